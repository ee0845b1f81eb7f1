"""Weight updates of engine local: names, shapes, merges, proof, and what a failure leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.api import (
    Acknowledgement,
    EngineDead,
    EngineError,
    Launch,
    LocalTensors,
    LoraFields,
    RolloutRequest,
    Sample,
    WeightBucket,
    WeightProof,
    WeightSource,
)
from drl.mathematics.checksum import tensors_digest, tensors_fingerprint
from drl.testing.contracts.weights import make_bucket
from drl_engine_local.engine import LocalEngine

Ask = Callable[..., list[Sample]]
LORA = LoraFields(rank=2, alpha=4.0)
LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj")


@pytest.fixture
def model(tiny_launch: Launch, checkpoint: str) -> nn.Module:
    return tiny_launch.family.build("transformer", WeightSource(checkpoint=checkpoint))


@pytest.fixture
def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def adapter(weights: Mapping[str, Tensor], seed: int, *, zero: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        rows, columns = weights[f"{layer}.weight"].shape
        tensors[f"{layer}.lora_A"] = torch.randn(2, columns, generator=g)
        B = torch.randn(rows, 2, generator=g)
        tensors[f"{layer}.lora_B"] = torch.zeros_like(B) if zero else B
    return tensors


def merged(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for layer in LAYERS:
        delta = tensors[f"{layer}.lora_B"] @ tensors[f"{layer}.lora_A"]
        result[f"{layer}.weight"] = weights[f"{layer}.weight"] + LORA.alpha / LORA.rank * delta
    return result


def begin(engine: LocalEngine) -> int:
    version = engine.version + 1
    asyncio.run(engine.begin_update(version))
    return version


def send(
    engine: LocalEngine, tensors: Mapping[str, Tensor], lora: LoraFields | None = None
) -> Acknowledgement:
    bucket = make_bucket(tensors, version=engine.version + 1, lora=lora)
    return asyncio.run(engine.update_weights(bucket))


def push(
    engine: LocalEngine, tensors: Mapping[str, Tensor], lora: LoraFields | None = None
) -> WeightProof:
    version = begin(engine)
    send(engine, tensors, lora)
    return asyncio.run(engine.end_update(version))


def held(engine: LocalEngine) -> dict[str, Tensor]:
    assert engine.store is not None
    return engine.store.components["transformer"].tensors


def test_dense_weights_are_copied_and_counted(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    proof = push(engine, changed)
    assert all(torch.equal(held(engine)[name], tensor) for name, tensor in changed.items())
    assert proof.counts == {"transformer": len(changed)}
    assert proof.checksums == {"transformer": tensors_digest(changed, changed.values())}
    changed[next(iter(changed))].zero_()  # the engine has its own copy
    assert not torch.equal(held(engine)[next(iter(changed))], changed[next(iter(changed))])


def test_a_dense_push_may_carry_a_part_and_buffers(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    table = held(engine)["pos_embed.pos_embed"] + 1
    assert push(engine, {"pos_embed.pos_embed": table}).counts == {"transformer": 1}
    assert torch.equal(held(engine)["pos_embed.pos_embed"], table)
    assert torch.equal(held(engine)["proj_out.weight"], weights["proj_out.weight"])


def test_adapters_are_merged_into_the_base(engine: LocalEngine, weights: dict[str, Tensor]) -> None:
    tensors = adapter(weights, 1)
    proof = push(engine, tensors, LORA)
    for name, tensor in merged(weights, tensors).items():
        assert torch.allclose(held(engine)[name], tensor, atol=1e-6)
    assert proof.counts == {"transformer": 4}
    assert proof.checksums == {"transformer": tensors_digest(tensors, tensors.values())}


def test_a_second_adapter_replaces_the_first(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    second = adapter(weights, 2)
    push(engine, second, LORA)
    alone = {name: tensor.clone() for name, tensor in held(engine).items()}
    push(engine, adapter(weights, 1), LORA)
    push(engine, second, LORA)
    assert all(torch.equal(held(engine)[name], tensor) for name, tensor in alone.items())


def test_a_thousand_merges_of_nothing_leave_the_base_byte_equal(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    store = engine.store
    assert store is not None
    before = tensors_digest(held(engine), held(engine).values())
    push(engine, adapter(weights, 1), LORA)
    bucket = make_bucket(adapter(weights, 1, zero=True), version=5, lora=LORA)
    for _ in range(1000):
        store.begin(5)
        store.stage(bucket)
        store.apply()
    assert tensors_digest(held(engine), held(engine).values()) == before


def test_the_model_checksum_tells_whether_weights_changed(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    nothing = push(engine, adapter(weights, 1, zero=True), LORA)
    something = push(engine, adapter(weights, 1), LORA)
    again = push(engine, adapter(weights, 1), LORA)
    fresh = tensors_fingerprint(held(engine), held(engine).values())
    assert nothing.model_checksums["transformer"] != something.model_checksums["transformer"]
    assert again.model_checksums == something.model_checksums == {"transformer": fresh}


def test_dense_after_a_merge_is_the_new_base(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    push(engine, adapter(weights, 1), LORA)
    other = {f"{layer}.weight": weights[f"{layer}.weight"] + 1 for layer in LAYERS}
    push(engine, other)
    assert all(torch.equal(held(engine)[name], tensor) for name, tensor in other.items())
    push(engine, adapter(weights, 1, zero=True), LORA)
    assert all(torch.equal(held(engine)[name], tensor) for name, tensor in other.items())


def test_dense_and_adapters_in_one_update_merge_into_the_new_weights(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    other = {f"{layer}.weight": weights[f"{layer}.weight"] + 1 for layer in LAYERS}
    tensors = adapter(weights, 1)
    version = begin(engine)
    send(engine, tensors, LORA)
    send(engine, other)
    proof = asyncio.run(engine.end_update(version))
    for name, tensor in merged(other, tensors).items():
        assert torch.allclose(held(engine)[name], tensor, atol=1e-6)
    names = {**other, **tensors}
    assert proof.checksums == {"transformer": tensors_digest(names, names.values())}
    push(engine, adapter(weights, 1, zero=True), LORA)
    assert all(torch.equal(held(engine)[name], tensor) for name, tensor in other.items())


def test_one_renamed_prefix_is_reported_with_every_name(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    renamed = {name.replace("transformer_blocks", "blocks"): t for name, t in weights.items()}
    begin(engine)
    answer = send(engine, renamed)
    assert set(answer.unexpected) == {name for name in renamed if name.startswith("blocks")}
    assert set(answer.applied) == {name for name in weights if "blocks" not in name}


def test_adapter_names_of_no_layer_are_reported(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    begin(engine)
    strange = {f"base_model.model.{name}": t for name, t in adapter(weights, 1).items()}
    strange["transformer_blocks.0.attn.to_q.magnitude"] = torch.zeros(3)
    answer = send(engine, strange, LORA)
    assert answer.applied == ()
    assert set(answer.unexpected) == set(strange)


def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors.pop(f"{LAYERS[0]}.lora_B")
    return tensors


def drop_a_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if LAYERS[0] not in name}


def reshape(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = f"{LAYERS[0]}.lora_A"
    return tensors | {name: tensors[name][:, :-1].contiguous()}


def wrong_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = f"{LAYERS[0]}.lora_A"
    return tensors | {name: torch.cat([tensors[name]] * 2)}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop, rf"{LAYERS[0]}\.lora_B never came"),
        (drop_a_layer, rf"leaves the previous adapter in {LAYERS[0]}\.weight"),
        (reshape, rf"{LAYERS[0]}\.lora_A: \(2, 31\) float32, the layer needs \(2, 32\)"),
        (wrong_rank, r"\(4, 32\) float32, the layer needs \(2, 32\)"),
    ],
)
def test_each_fault_of_an_adapter_has_its_own_error_and_changes_nothing(
    engine: LocalEngine,
    weights: dict[str, Tensor],
    fault: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    push(engine, adapter(weights, 1), LORA)
    before = tensors_digest(held(engine), held(engine).values())
    with pytest.raises(EngineError, match=message):
        push(engine, fault(adapter(weights, 2)), LORA)
    assert tensors_digest(held(engine), held(engine).values()) == before
    assert engine.version == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(3), r"proj_out\.bias: \(3,\) float32, held \(16,\) float32"),
        (torch.zeros(16, dtype=torch.int64), r"\(16,\) int64, held \(16,\) float32"),
    ],
)
def test_a_dense_tensor_that_does_not_fit_changes_nothing(
    engine: LocalEngine, weights: dict[str, Tensor], ask: Ask, wrong: Tensor, message: str
) -> None:
    before = ask(7)[0]
    begin(engine)
    send(engine, {"proj_out.weight": weights["proj_out.weight"] + 1})
    with pytest.raises(EngineError, match=message):
        send(engine, {"proj_out.bias": wrong})
    after = ask(7)[0]
    assert torch.equal(latents(before), latents(after))
    assert after.version == 0
    with pytest.raises(EngineError, match="no update in progress"):
        asyncio.run(engine.end_update(1))


def latents(sample: Sample) -> Tensor:
    assert sample.trajectory is not None
    return sample.trajectory.latents["visual"]


def test_lower_precision_is_stored_as_the_engine_stores(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    low = {"proj_out.bias": torch.linspace(0, 1, 16).bfloat16()}
    proof = push(engine, low)
    assert torch.equal(held(engine)["proj_out.bias"], low["proj_out.bias"].float())
    assert proof.checksums == {"transformer": tensors_digest(low, low.values())}


def bucket_of(weights: Mapping[str, Tensor], **changes: Any) -> WeightBucket:
    one = {"proj_out.bias": weights["proj_out.bias"]}
    return replace(make_bucket(one, version=1), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": "0" * 64}, "has checksum"),
        ({"component": "transformer_2"}, "no component 'transformer_2'; it has transformer"),
        ({"version": 3}, "is of version 3; the update makes 1"),
        ({"payload": "sparse"}, "payload 'sparse'; known are dense, lora_merge"),
        ({"lora": LORA}, "rank and alpha belong to lora_merge buckets"),
        ({"payload": "lora_merge"}, "rank and alpha belong to lora_merge buckets"),
        ({"names": ("a", "b")}, "2 names, 1 shapes, 1 dtypes and 1 tensors"),
        ({"shapes": ((3,),)}, r"labelled \(3,\) float32 but is \(16,\)"),
        ({"dtypes": ("bfloat16",)}, r"labelled \(16,\) bfloat16 but is"),
        ({"carrier": LocalTensors(tensors=(torch.ones(16),))}, "has checksum"),
    ],
)
def test_a_bucket_that_is_not_what_it_says_is_refused(
    engine: LocalEngine, weights: dict[str, Tensor], changes: dict[str, Any], message: str
) -> None:
    begin(engine)
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.update_weights(bucket_of(weights, **changes)))


def test_a_name_that_comes_twice_is_refused(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    begin(engine)
    asyncio.run(engine.update_weights(bucket_of(weights)))
    with pytest.raises(EngineError, match=r"proj_out\.bias came twice"):
        asyncio.run(engine.update_weights(bucket_of(weights)))


def test_an_update_waits_for_running_requests_and_holds_back_new_ones(
    engine: LocalEngine,
    weights: dict[str, Tensor],
    request_for: Callable[..., RolloutRequest],
) -> None:
    async def story() -> tuple[list[Sample], bool, list[Sample]]:
        early = asyncio.create_task(engine.generate(request_for(*range(6))))
        await asyncio.sleep(0)
        await engine.begin_update(1)
        late = asyncio.create_task(engine.generate(request_for(*range(6))))
        changed = {name: tensor * 1.1 for name, tensor in weights.items()}
        await engine.update_weights(make_bucket(changed, version=1))
        await asyncio.sleep(0.05)
        held_back = not late.done()
        drained = early.done() or not engine.waiting.jobs
        await engine.end_update(1)
        return await early, held_back and drained, await late

    early, held_back, late = asyncio.run(story())
    assert held_back
    assert {sample.version for sample in early} == {0}
    assert {sample.version for sample in late} == {1}


def test_an_update_begun_anew_forgets_what_came_before(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    begin(engine)
    send(engine, {"proj_out.bias": weights["proj_out.bias"] + 1})
    proof = push(engine, {"proj_out.weight": weights["proj_out.weight"] + 1})
    assert proof.counts == {"transformer": 1}
    assert torch.equal(held(engine)["proj_out.bias"], weights["proj_out.bias"])


def test_an_update_cannot_end_as_another_version(
    engine: LocalEngine, weights: dict[str, Tensor]
) -> None:
    begin(engine)
    with pytest.raises(EngineError, match="update 1 cannot be ended as version 2"):
        asyncio.run(engine.end_update(2))


def test_updating_a_stopped_engine_is_refused(engine: LocalEngine) -> None:
    asyncio.run(engine.stop())
    with pytest.raises(EngineDead, match="not running"):
        asyncio.run(engine.begin_update(1))
