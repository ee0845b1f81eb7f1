"""What a weight update of engine local leaves when it fails: the old version whole, or nothing to sample with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.api import (
    Context,
    EngineError,
    Launch,
    LoraFields,
    RolloutRequest,
    Sample,
    WeightProof,
    WeightSource,
)
from drl.mathematics.checksum import tensors_digest
from drl.testing.contracts.weights import make_bucket
from drl_engine_local import weights
from drl_engine_local.component import Component
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_engine_local.weights import WeightStore, unlike

LORA = LoraFields(rank=2, alpha=4.0)
LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj")
SECONDS = 20.0


def store_of(engine: LocalEngine) -> WeightStore:
    assert engine.store is not None
    return engine.store


def component_of(engine: LocalEngine) -> Component:
    return store_of(engine).components["transformer"]


def digest(engine: LocalEngine) -> str:
    held = component_of(engine).held()
    return tensors_digest(held, held.values())


def adapter(engine: LocalEngine, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        rows, columns = component_of(engine).tensors[f"{layer}.weight"].shape
        tensors[f"{layer}.lora_A"] = torch.randn(2, columns, generator=g)
        tensors[f"{layer}.lora_B"] = torch.randn(rows, 2, generator=g)
    return tensors


async def pushed(
    engine: LocalEngine, tensors: Mapping[str, Tensor], lora: LoraFields | None = None
) -> WeightProof:
    version = engine.version + 1
    await engine.begin_update(version)
    await engine.update_weights(make_bucket(tensors, version=version, lora=lora))
    return await engine.end_update(version)


def push(
    engine: LocalEngine, tensors: Mapping[str, Tensor], lora: LoraFields | None = None
) -> WeightProof:
    return asyncio.run(pushed(engine, tensors, lora))


def sample(engine: LocalEngine, request: RolloutRequest) -> Sample:
    """Make one sample; an engine that keeps its door closed is a failure, not a wait."""
    return asyncio.run(asyncio.wait_for(engine.generate(request), SECONDS))[0]


def latents(made: Sample) -> Tensor:
    assert made.trajectory is not None
    return made.trajectory.latents["visual"]


def started(launch: Launch, **options: Any) -> LocalEngine:
    engine = LocalEngine(LocalOptions.model_validate({"rows": 4, **options}), Context())
    asyncio.run(engine.start(launch))
    return engine


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_nan_that_was_sent_is_held_and_proven(engine: LocalEngine) -> None:
    bias = component_of(engine).tensors["proj_out.bias"].detach().clone()
    bias[0] = float("nan")
    sent = {"proj_out.bias": bias}
    assert push(engine, sent).checksums == {"transformer": tensors_digest(sent, sent.values())}
    assert engine.version == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_unlike_when_a_bit_is_in_the_dtype_held(dtype: torch.dtype) -> None:
    sent = torch.tensor([1.0, float("nan"), float("inf"), 1e-3])
    changed = sent.clone()
    changed[3] = 2e-3
    assert unlike(["a", "b"], [sent.to(dtype)] * 2, [sent, changed]) == ["b"]


@pytest.mark.parametrize("place", ["stage", "prepare"])
def test_want_of_memory_before_the_writing_leaves_the_old_version_in_service(
    engine: LocalEngine,
    request_for: Callable[..., RolloutRequest],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    before, weights = sample(engine, request_for(7)), digest(engine)
    store = store_of(engine)
    target = store if place == "stage" else component_of(engine)
    monkeypatch.setattr(target, place, full)
    with pytest.raises(torch.OutOfMemoryError):
        push(engine, adapter(engine), LORA)
    monkeypatch.undo()
    assert digest(engine) == weights
    after = sample(engine, request_for(7))
    assert (after.version, store.stages) == (0, {})
    assert torch.equal(latents(after), latents(before))
    push(engine, adapter(engine), LORA)
    assert sample(engine, request_for(7)).version == 1


def test_adapter_layers_without_room_for_all_are_taken_out_again(
    tiny_launch: Launch, request_for: Callable[..., RolloutRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = replace(tiny_launch, lora_targets={"transformer": LAYERS})
    engine = started(launch, adapters="applied")
    before = sample(engine, request_for(7))
    names = [name for name, _ in component_of(engine).model.named_modules()]
    monkeypatch.setattr(import_module("drl.lora.inject"), "reset_adapters", full)
    with pytest.raises(torch.OutOfMemoryError):
        push(engine, adapter(engine), LORA)
    monkeypatch.undo()
    assert [name for name, _ in component_of(engine).model.named_modules()] == names
    after = sample(engine, request_for(7))
    assert torch.equal(latents(after), latents(before))
    push(engine, adapter(engine), LORA)
    assert not torch.equal(latents(sample(engine, request_for(7))), latents(after))
    asyncio.run(engine.stop())


@pytest.mark.parametrize("error", [EngineError("not held as sent"), torch.OutOfMemoryError("full")])
def test_weights_that_may_be_half_new_are_not_sampled_with(
    engine: LocalEngine,
    request_for: Callable[..., RolloutRequest],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def failing(*_: Any) -> str:
        raise error

    monkeypatch.setattr(store_of(engine), "_digest", failing)
    with pytest.raises(type(error)):
        push(engine, adapter(engine), LORA)
    monkeypatch.undo()
    assert engine.version == 0
    with pytest.raises(EngineError, match="neither the old weights nor the new ones"):
        sample(engine, request_for(7))
    push(engine, adapter(engine, 2), LORA)
    assert sample(engine, request_for(7)).version == 1


def test_an_update_whose_end_is_cancelled_leaves_weights_and_version_that_belong_together(
    engine: LocalEngine, request_for: Callable[..., RolloutRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    write = Component.write

    def slow(*arguments: Any) -> None:
        writing.set()
        assert go_on.wait(SECONDS)
        write(*arguments)

    async def cancelled() -> Sample:
        task = asyncio.create_task(pushed(engine, adapter(engine), LORA))
        await asyncio.to_thread(writing.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asked = asyncio.create_task(engine.generate(request_for(7)))
        go_on.set()
        return (await asyncio.wait_for(asked, SECONDS))[0]

    monkeypatch.setattr(Component, "write", slow)
    made = asyncio.run(cancelled())
    again = sample(engine, request_for(7))
    assert (made.version, again.version) == (1, 1)
    assert torch.equal(latents(made), latents(again))
    assert store_of(engine).stages == {}


@pytest.mark.parametrize(
    "options",
    [{"adapters": "applied", "weights": "fp32"}, {"adapters": "merged", "weights": "forward"}],
)
def test_a_change_that_rounding_takes_away_is_told_from_one_that_was_lost(
    tiny_launch: Launch, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    launch = replace(tiny_launch, dtype="fp16", lora_targets={"transformer": LAYERS})
    engine = started(launch, **options)
    tensors = adapter(engine)
    near = {name: tensor + 1e-9 * (tensor.abs() < 1e-2) for name, tensor in tensors.items()}
    first, second = push(engine, tensors, LORA), push(engine, near, LORA)
    assert first.checksums != second.checksums
    assert first.model_checksums == second.model_checksums
    assert (first.unchanged, second.unchanged) == (frozenset(), frozenset({"transformer"}))
    other = adapter(engine, 2)
    if options["adapters"] == "merged":  # applied ones are compared with what was sent anyway
        with monkeypatch.context() as patch:
            patch.setattr(Component, "write", lambda *_: None)
            lost = push(engine, other, LORA)
        assert (lost.model_checksums, lost.unchanged) == (first.model_checksums, frozenset())
    assert push(engine, other, LORA).unchanged == frozenset()
    asyncio.run(engine.stop())


def test_a_dense_change_that_rounding_takes_away_is_told_too(
    tiny_launch: Launch, checkpoint: str
) -> None:
    engine = started(replace(tiny_launch, dtype="bf16"), weights="forward")
    model = tiny_launch.family.build("transformer", WeightSource(checkpoint=checkpoint))
    weight = model.get_parameter("proj_out.weight").detach().bfloat16().float()
    push(engine, {"proj_out.weight": weight})
    assert push(engine, {"proj_out.weight": weight * (1 + 1e-5)}).unchanged == {"transformer"}
    assert push(engine, {"proj_out.weight": weight * 1.5}).unchanged == frozenset()
    asyncio.run(engine.stop())


@pytest.mark.parametrize("most", [1, 60, 2**20])
def test_each_unlike_tensor_is_named_however_they_are_compared(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(weights, "FINGERPRINT_BYTES", most)
    dtypes = [
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.int8,
        torch.float32,
    ]
    held = [torch.full((2, 3 + n), float(n)).to(dtype) for n, dtype in enumerate(dtypes)]
    sent = [tensor.float() if n % 2 else tensor.clone() for n, tensor in enumerate(held)]
    sent[3] = sent[3].t().contiguous().t()
    held[5][0, 0] = sent[5][0, 0] = torch.nan
    names = [str(n) for n in range(len(held))]
    assert unlike(names, held, sent) == []
    for wrong in (("0",), ("2", "3"), ("4", "5"), tuple(names)):
        changed = [t + 1 if n in wrong else t for n, t in zip(names, sent, strict=True)]
        if "5" in wrong:
            changed[5][0, 1] = 9.0
        assert unlike(names, held, changed) == list(wrong)
    assert unlike([], [], []) == []
