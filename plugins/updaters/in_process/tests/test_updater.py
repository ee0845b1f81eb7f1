"""Which plans fit, and whole pushes to the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drl.api import (
    Acknowledgement,
    Context,
    Engine,
    EngineCapabilities,
    EngineClient,
    EngineError,
    EngineHandle,
    Family,
    Launch,
    LoraFields,
    PackedUnits,
    SyncError,
    SyncPlan,
    Updater,
    WeightBucket,
    WeightProof,
    WeightSource,
)
from drl.catalog import Catalog
from drl.interfaces.engine import CLIENTS
from drl.lora import LoraConfig, adapter_state, inject, merged_state, to_pushed_name
from drl.mathematics.checksum import tensors_fingerprint
from drl_family_sd3.tiny import build_random
from drl_updater_in_process.updater import InProcessFull, InProcessLora, InProcessMerged

BOTH = EngineCapabilities(
    transports=frozenset({"local"}), payloads=frozenset({"dense", "lora_merge"})
)
PLAN = SyncPlan(
    trained="adapters", placement="same_process", components=("transformer",), engines=(BOTH,)
)
LORA = LoraFields(rank=2, alpha=4.0)


def updater(kind: type[Updater]) -> Updater:
    return kind(None, Context())


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (InProcessFull, {"trained": "adapters"}, "trains adapters"),
        (InProcessMerged, {"trained": "full"}, "nothing to merge"),
        (InProcessLora, {"trained": "full"}, "no adapter to push"),
        (InProcessLora, {"uniform_adapters": False}, "rank or alpha per layer"),
        (InProcessLora, {"placement": "other_gpu"}, "placement other_gpu"),
        (InProcessMerged, {"engines": ()}, "no engine"),
        (
            InProcessLora,
            {"engines": (replace(BOTH, payloads=frozenset({"dense"})),)},
            "takes no lora_merge buckets; it takes dense",
        ),
        (
            InProcessMerged,
            {"engines": (BOTH, replace(BOTH, transports=frozenset({"nccl"})))},
            "no transport 'local'; it has nccl",
        ),
        (InProcessMerged, {"engines": (EngineCapabilities(),)}, "it has none"),
    ],
)
def test_a_plan_that_does_not_fit_gets_the_reason(
    kind: type[Updater], changes: dict[str, object], reason: str
) -> None:
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    answer = updater(kind).accepts(plan)
    assert answer is not None
    assert reason in answer


def test_adapters_of_many_ranks_can_be_merged_by_the_trainer() -> None:
    assert updater(InProcessMerged).accepts(replace(PLAN, uniform_adapters=False)) is None


def test_pushing_before_connecting_is_refused() -> None:
    with pytest.raises(SyncError, match="call connect before push"):
        updater(InProcessFull).push("transformer", iter(()), 1)


def test_an_engine_of_another_process_is_refused() -> None:
    handle = EngineHandle(component="sglang", address="http://far:1", capabilities=BOTH)
    with pytest.raises(SyncError, match="'http://far:1' does not live in this process"):
        updater(InProcessFull).connect(Context(), [handle])


@dataclass
class Client(EngineClient):
    """Blocking calls of an engine."""

    engine: Engine

    def begin_update(self, version: int) -> None:
        asyncio.run(self.engine.begin_update(version))

    def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        return asyncio.run(self.engine.update_weights(bucket))

    def end_update(self, version: int) -> WeightProof:
        return asyncio.run(self.engine.end_update(version))


@dataclass
class Side:
    """A trainer's model and an engine that started from the same checkpoint."""

    model: nn.Module
    client: Client
    handle: EngineHandle

    def expected(self) -> str:
        """Digest of the trainer's weights with adapters merged in."""
        merged = dict(merged_state(self.model))
        return tensors_fingerprint(merged, merged.values())

    def push(self, kind: type[Updater], packs: list[PackedUnits], version: int) -> WeightProof:
        """Make one whole update, as core does."""
        made = updater(kind)
        made.connect(Context(), [self.handle])
        self.client.begin_update(version)
        report = made.push("transformer", iter(packs), version)
        proof = self.client.end_update(version)
        assert report.checksum == proof.checksums["transformer"]
        assert len(report.names) == proof.counts["transformer"]
        made.close()
        return proof


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-sd3")
    build_random(path, seed=0)
    return str(path)


@pytest.fixture
def side(checkpoint: str) -> Iterator[Side]:
    catalog = Catalog.load()
    family: Family = catalog.create("family", "sd3", defaults(catalog, "family", "sd3"), Context())
    engine: Engine = catalog.create(
        "engine", "local", defaults(catalog, "engine", "local"), Context()
    )
    info = asyncio.run(engine.start(Launch(checkpoint=checkpoint, family=family, sde_backends={})))
    client = Client(engine)
    CLIENTS[info.address] = client
    handle = EngineHandle(
        component="local", address=info.address, capabilities=engine.capabilities()
    )
    yield Side(family.build("transformer", WeightSource(checkpoint=checkpoint)), client, handle)
    del CLIENTS[info.address]
    asyncio.run(engine.stop())


def defaults(catalog: Catalog, kind: str, name: str) -> object:
    model = catalog.options_model(kind, name)
    assert model is not None
    return model.model_validate({})


def adapted(model: nn.Module, seed: int) -> None:
    """Give a model adapters that do something."""
    config = LoraConfig(rank=2, alpha=4, target_modules=("attn.to_q", "attn.add_v_proj"))
    inject(model, config, generator=torch.Generator().manual_seed(seed))
    shake(model, seed)


def shake(model: nn.Module, seed: int) -> None:
    """Move everything that trains."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def dense_packs(model: nn.Module) -> list[PackedUnits]:
    return [PackedUnits(names=(n,), tensors=(t,)) for n, t in merged_state(model)]


def adapter_packs(model: nn.Module) -> list[PackedUnits]:
    state = {to_pushed_name(key): tensor for key, tensor in adapter_state(model).items()}
    layers = sorted({name.rpartition(".")[0] for name in state})
    pairs = [(f"{layer}.lora_A", f"{layer}.lora_B") for layer in layers]
    return [
        PackedUnits(names=pair, tensors=tuple(state[n] for n in pair), lora=LORA) for pair in pairs
    ]


def test_full_weights_arrive_bit_for_bit(side: Side) -> None:
    shake(side.model, 1)
    proof = side.push(InProcessFull, dense_packs(side.model), 1)
    assert proof.model_checksums["transformer"] == side.expected()


def test_adapters_merged_here_or_there_are_the_same_weights(side: Side) -> None:
    adapted(side.model, 1)
    there = side.push(InProcessLora, adapter_packs(side.model), 1)
    here = side.push(InProcessMerged, dense_packs(side.model), 2)
    assert there.model_checksums == here.model_checksums == {"transformer": side.expected()}


def test_adapters_follow_the_trainer_over_many_steps(side: Side) -> None:
    adapted(side.model, 1)
    for version in range(1, 6):
        shake(side.model, version)
        proof = side.push(InProcessLora, adapter_packs(side.model), version)
        assert proof.model_checksums["transformer"] == side.expected()


def test_a_push_that_fails_half_way_leaves_the_old_weights(side: Side) -> None:
    adapted(side.model, 1)
    before = side.push(InProcessLora, adapter_packs(side.model), 1)
    shake(side.model, 2)
    packs = adapter_packs(side.model)
    broken = replace(packs[-1], tensors=(packs[-1].tensors[0][:, :-1], packs[-1].tensors[1]))
    made = updater(InProcessLora)
    made.connect(Context(), [side.handle])
    side.client.begin_update(2)
    with pytest.raises(EngineError, match="nothing was applied"):
        made.push("transformer", iter([*packs[:-1], broken]), 2)
    side.client.begin_update(3)
    assert side.client.end_update(3).model_checksums == before.model_checksums


def test_other_ranks_draw_every_pack_and_send_none(side: Side) -> None:
    adapted(side.model, 1)
    packs = adapter_packs(side.model)
    helper = updater(InProcessLora)
    # an engine of another process: only rank 0 could open it
    helper.connect(Context(rank=1, world=2), [replace(side.handle, address="elsewhere")])
    left = iter(packs)
    report = helper.push("transformer", left, 1)
    assert next(left, None) is None
    assert report.names == tuple(name for pack in packs for name in pack.names)
    assert (report.buckets, report.bytes, report.version) == (0, 0, 1)
    helper.close()
