"""Engine local on the trainer's own frozen weights: what it holds, what it never writes, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.api import (
    BadInput,
    Context,
    EngineError,
    Launch,
    LoraFields,
    Memory,
    RolloutRequest,
    Sample,
    WeightProof,
    WeightSource,
)
from drl.lora import LoraConfig, adapters, inject, merged_state
from drl.mathematics.checksum import tensors_digest
from drl.model.shared import base_tensors, shared_tensors
from drl.testing.contracts.weights import make_bucket
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine

RANK, ALPHA = 2, 4.0
LORA = LoraFields(rank=RANK, alpha=ALPHA)


class Trained:
    """A model as a trainer has it: frozen base, adapters that move."""

    def __init__(self, launch: Launch) -> None:
        source = WeightSource(checkpoint=launch.checkpoint)
        self.model = launch.family.build("transformer", source)
        config = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=("to_q", "add_k_proj"))
        self.layers = inject(self.model, config, generator=torch.Generator().manual_seed(0))
        self.shared = shared_tensors(self.model, "cpu")

    def move(self, seed: int) -> dict[str, Tensor]:
        """Give the adapters other values in place, as a step does; return them by pushed name."""
        g = torch.Generator().manual_seed(seed)
        pushed = {}
        for layer, one in adapters(self.model).items():
            for matrix, tensor in (("lora_A", one.A), ("lora_B", one.B)):
                tensor.data.normal_(generator=g)
                pushed[f"{layer}.{matrix}"] = tensor.detach()
        return pushed

    def digest(self) -> str:
        base = dict(base_tensors(self.model))
        return tensors_digest(base, base.values())

    def merged(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in merged_state(self.model)}


def started(launch: Launch, trained: Trained | None, **options: Any) -> LocalEngine:
    engine = LocalEngine(LocalOptions.model_validate({"rows": 4, **options}), Context())
    if trained is not None:
        targets = {"transformer": trained.layers}
        launch = replace(launch, shared={"transformer": trained.shared}, lora_targets=targets)
    asyncio.run(engine.start(launch))
    return engine


@pytest.fixture
def trained(tiny_launch: Launch) -> Trained:
    return Trained(tiny_launch)


@pytest.fixture(params=["merged", "applied"])
def engine(
    request: pytest.FixtureRequest, tiny_launch: Launch, trained: Trained
) -> Iterator[LocalEngine]:
    made = started(tiny_launch, trained, adapters=request.param)
    yield made
    asyncio.run(made.stop())


def push(engine: LocalEngine, tensors: dict[str, Tensor], lora: LoraFields | None) -> WeightProof:
    version = engine.version + 1
    asyncio.run(engine.begin_update(version))
    asyncio.run(engine.update_weights(make_bucket(tensors, version=version, lora=lora)))
    return asyncio.run(engine.end_update(version))


def sample(engine: LocalEngine, request_for: Callable[..., RolloutRequest]) -> Sample:
    (made,) = asyncio.run(engine.generate(request_for(7)))
    return made


def latents(made: Sample) -> Tensor:
    assert made.trajectory is not None
    return made.trajectory.latents["visual"]


def module_of(engine: LocalEngine) -> nn.Module:
    assert engine.store is not None
    return engine.store.components["transformer"].model


def own_bytes(engine: LocalEngine) -> int:
    assert engine.store is not None
    return sum(tensor.nbytes for tensor in engine.store.own())


def test_the_engines_module_is_made_of_the_trainers_memory(
    engine: LocalEngine, trained: Trained
) -> None:
    live = {**dict(module_of(engine).named_parameters()), **dict(module_of(engine).named_buffers())}
    assert live.keys() == trained.shared.keys()
    for name, tensor in live.items():
        assert tensor.data_ptr() == trained.shared[name].data_ptr(), name
        assert not tensor.requires_grad
    assert own_bytes(engine) == 0
    assert engine.capabilities().shares_weights
    assert engine.capabilities().payloads == {"lora_merge"}


def test_it_samples_as_an_engine_with_a_copy_does(
    engine: LocalEngine,
    tiny_launch: Launch,
    trained: Trained,
    request_for: Callable[..., RolloutRequest],
) -> None:
    copy = started(tiny_launch, None)
    assert not copy.capabilities().shares_weights
    pushed = trained.move(1)
    exact = engine.options.adapters == "merged"
    for one in (engine, copy):
        push(one, pushed, LORA)
    here, there = (latents(sample(one, request_for)) for one in (engine, copy))
    assert torch.equal(here, there) if exact else torch.allclose(here, there, atol=1e-4)
    asyncio.run(copy.stop())


def test_a_thousand_syncs_leave_the_trainers_weights_as_they_are(
    engine: LocalEngine, trained: Trained
) -> None:
    store, before = engine.store, trained.digest()
    assert store is not None
    for number in range(1000):
        bucket = make_bucket(trained.move(number % 7), version=5, lora=LORA)
        store.begin(5)
        store.stage(bucket)
        store.apply()
    assert trained.digest() == before
    if engine.options.adapters == "merged":
        for name, tensor in trained.merged().items():
            assert torch.equal(store.components["transformer"].tensors[name], tensor), name


def test_later_syncs_write_where_the_first_one_did(engine: LocalEngine, trained: Trained) -> None:
    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in module_of(engine).parameters()]

    assert engine.store is not None
    first = push(engine, trained.move(1), LORA)
    after_one, own = places(), own_bytes(engine)
    second = push(engine, trained.move(2), LORA)
    assert places() == after_one
    assert own_bytes(engine) == own > 0
    assert first.model_checksums != second.model_checksums
    adapted = sum(trained.shared[f"{layer}.weight"].nbytes for layer in trained.layers)
    factors = sum(tensor.nbytes for tensor in trained.move(2).values())
    assert own == (adapted if engine.options.adapters == "merged" else factors)


def test_an_equal_push_is_seen_to_change_nothing(engine: LocalEngine, trained: Trained) -> None:
    pushed = trained.move(1)
    first, again = push(engine, pushed, LORA), push(engine, pushed, LORA)
    assert first.model_checksums == again.model_checksums
    assert (
        first.checksums
        == again.checksums
        == {"transformer": tensors_digest(pushed, pushed.values())}
    )
    assert first.counts == {"transformer": 2 * len(trained.layers)}


def test_the_proof_is_of_what_came_whatever_the_trainer_does_meanwhile(
    engine: LocalEngine, trained: Trained
) -> None:
    pushed = {name: tensor.clone() for name, tensor in trained.move(1).items()}
    asyncio.run(engine.begin_update(1))
    asyncio.run(engine.update_weights(make_bucket(pushed, version=1, lora=LORA)))
    expected = {"transformer": tensors_digest(pushed, pushed.values())}
    for tensor in pushed.values():
        tensor.zero_()  # an average that leaves the model again before the update ends
    assert asyncio.run(engine.end_update(1)).checksums == expected
    held = engine.store.components["transformer"].held() if engine.store is not None else {}
    if engine.options.adapters == "merged":
        assert all(torch.equal(held[name], tensor) for name, tensor in trained.merged().items())
    else:
        now = trained.move(1)
        assert all(torch.equal(held[name], tensor) for name, tensor in now.items())


def test_frozen_weights_that_somebody_wrote_are_found_at_the_next_sync(
    engine: LocalEngine, trained: Trained
) -> None:
    push(engine, trained.move(1), LORA)
    push(engine, trained.move(2), LORA)
    trained.model.get_parameter("proj_out.bias").data[3] += 1e-6
    assert engine.store is not None
    before = [tensor.clone() for tensor in engine.store.own()]
    with pytest.raises(
        EngineError, match="frozen weights that trainer and engine share have changed"
    ):
        push(engine, trained.move(3), LORA)
    assert all(map(torch.equal, engine.store.own(), before))  # found before anything is written


def test_dense_weights_are_refused_and_nothing_is_written(
    engine: LocalEngine, trained: Trained, request_for: Callable[..., RolloutRequest]
) -> None:
    before, digest = sample(engine, request_for), trained.digest()
    with pytest.raises(EngineError, match="the engine computes with the trainer's own weights"):
        push(engine, {"proj_out.bias": trained.shared["proj_out.bias"] + 1}, None)
    assert trained.digest() == digest
    assert torch.equal(latents(sample(engine, request_for)), latents(before))


def test_release_moves_what_is_its_own_and_nothing_else(
    engine: LocalEngine, trained: Trained, request_for: Callable[..., RolloutRequest]
) -> None:
    push(engine, trained.move(1), LORA)
    before = sample(engine, request_for)
    assert engine.store is not None
    own = engine.store.own()
    places = [tensor.data_ptr() for tensor in own]
    base = [tensor.data_ptr() for tensor in trained.shared.values()]
    asyncio.run(engine.release(Memory.WEIGHTS))
    assert not set(places) & {tensor.data_ptr() for tensor in own}
    assert base == [tensor.data_ptr() for tensor in trained.shared.values()]
    asyncio.run(engine.resume(Memory.WEIGHTS))
    assert torch.equal(latents(sample(engine, request_for)), latents(before))


@pytest.mark.parametrize("what", list(Memory))
def test_an_engine_without_its_memory_says_so(
    engine: LocalEngine, request_for: Callable[..., RolloutRequest], what: Memory
) -> None:
    asyncio.run(engine.release(what))
    asyncio.run(engine.release(what))  # twice is once
    with pytest.raises(EngineError, match="resume it before it samples"):
        sample(engine, request_for)
    if what is Memory.WEIGHTS:
        with pytest.raises(EngineError, match="resume them first"):
            asyncio.run(engine.begin_update(1))
    asyncio.run(engine.resume(what))
    assert sample(engine, request_for).version == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"proj_out.extra": torch.zeros(1)}, r"1 unknown \['proj_out.extra'\]"),
        (lambda s: {n: t for n, t in s.items() if n != "proj_out.bias"}, r"1 missing \['proj_out"),
        (
            lambda s: s | {"proj_out.bias": torch.zeros(3)},
            r"proj_out.bias: \(3,\), the module needs",
        ),
    ],
)
def test_weights_of_another_model_are_an_error(
    tiny_launch: Launch, trained: Trained, change: Callable[..., Any], message: str
) -> None:
    trained.shared = change(trained.shared)
    with pytest.raises(EngineError, match=message):
        started(tiny_launch, trained)


def test_shared_where_nothing_is_shared_is_refused(tiny_launch: Launch) -> None:
    with pytest.raises(BadInput, match="no weights to share for transformer"):
        started(tiny_launch, None, weights="shared")


def test_applied_where_no_adapters_come_is_refused(tiny_launch: Launch) -> None:
    with pytest.raises(BadInput, match="no adapters are pushed to the engine"):
        started(tiny_launch, None, adapters="applied")


@pytest.mark.parametrize("weights", ["fp32", "forward"])
def test_a_copy_stays_a_copy_although_weights_are_offered(
    tiny_launch: Launch, trained: Trained, weights: str
) -> None:
    engine = started(replace(tiny_launch, dtype="bf16"), trained, weights=weights)
    assert not engine.capabilities().shares_weights
    held = module_of(engine).get_parameter("proj_out.weight")
    assert held.data_ptr() != trained.shared["proj_out.weight"].data_ptr()
    assert held.dtype == (torch.float32 if weights == "fp32" else torch.bfloat16)
    asyncio.run(engine.stop())


def test_applied_adapters_of_another_rank_or_in_another_layer_change_nothing(
    tiny_launch: Launch, trained: Trained
) -> None:
    engine = started(tiny_launch, trained, adapters="applied")
    pushed = trained.move(1)
    proof = push(engine, pushed, LORA)
    with pytest.raises(EngineError, match=r"alpha=9.0\), the model applies .*alpha=4.0"):
        push(engine, pushed, LoraFields(rank=RANK, alpha=9.0))
    weight = trained.shared["proj_out.weight"]
    strange = {
        "proj_out.lora_A": torch.zeros(RANK, weight.shape[1]),
        "proj_out.lora_B": torch.zeros(weight.shape[0], RANK),
    }
    with pytest.raises(EngineError, match=r"proj_out.lora_A: .*has no part in it"):
        push(engine, pushed | strange, LORA)
    assert engine.version == 1
    assert push(engine, pushed, LORA).model_checksums == proof.model_checksums
    asyncio.run(engine.stop())


def test_applied_adapters_are_rounded_at_the_sync_as_each_forward_would(
    tiny_launch: Launch, trained: Trained, request_for: Callable[..., RolloutRequest]
) -> None:
    launch = replace(tiny_launch, dtype="bf16")
    engines = [started(launch, trained, adapters="applied") for _ in range(2)]
    once, each = (engine.store.components["transformer"] for engine in engines if engine.store)
    each.autocast = None
    pushed = trained.move(1)
    proofs = [push(engine, pushed, LORA) for engine in engines]
    assert proofs[0].checksums == proofs[1].checksums
    assert {tensor.dtype for tensor in once.factors.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in each.factors.values()} == {torch.float32}
    here, there = (latents(sample(engine, request_for)) for engine in engines)
    assert torch.equal(here, there)
    push(engines[0], {name: torch.zeros_like(tensor) for name, tensor in pushed.items()}, LORA)
    assert not torch.equal(latents(sample(engines[0], request_for)), here)
    for engine in engines:
        asyncio.run(engine.stop())


def test_dense_weights_end_an_applied_adapter_of_their_layer(
    tiny_launch: Launch, trained: Trained, request_for: Callable[..., RolloutRequest]
) -> None:
    engine = started(tiny_launch, trained, adapters="applied", weights="fp32")
    before = sample(engine, request_for)
    push(engine, trained.move(1), LORA)
    assert not torch.equal(latents(sample(engine, request_for)), latents(before))
    base = {f"{layer}.weight": trained.shared[f"{layer}.weight"] for layer in trained.layers}
    push(engine, base, None)
    assert torch.equal(latents(sample(engine, request_for)), latents(before))
    asyncio.run(engine.stop())
