"""``UpdaterContract``: what every updater keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from drl.errors import EngineError
from drl.interfaces.engine import (
    CLIENTS,
    Acknowledgement,
    EngineCapabilities,
    EngineClient,
    EngineHandle,
    LoraFields,
    WeightBucket,
    WeightProof,
)
from drl.interfaces.updater import PackedUnits, SyncPlan, Updater
from drl.lora import merge_delta
from drl.mathematics.checksum import tensors_digest
from drl.testing.contracts.base import ContractBase
from drl.types import Context, Role

LORA = LoraFields(rank=2, alpha=4.0)
LAYERS = ("blocks.0.to_q", "blocks.0.to_v", "blocks.1.to_q")


@dataclass
class RecordingClient(EngineClient):
    """The receiving end of a push: keeps every bucket, and the weights that would result.

    ``refuse_at``: number of the bucket that is answered with an EngineError.
    """

    weights: dict[str, Tensor]
    refuse_at: int | None = None
    version: int = 0
    buckets: list[WeightBucket] = field(default_factory=list)

    def begin_update(self, version: int) -> None:
        """Forget the buckets of the last update."""
        self.version = version
        self.buckets = []

    def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        """Keep one bucket."""
        if self.refuse_at == len(self.buckets):
            raise EngineError(f"bucket {bucket.index} refused")
        self.buckets.append(bucket)
        known = [name for name in bucket.names if self.knows(name)]
        unknown = [name for name in bucket.names if not self.knows(name)]
        return Acknowledgement(applied=tuple(known), unexpected=tuple(unknown))

    def knows(self, name: str) -> bool:
        """Say whether a pushed name belongs to the weights."""
        layer, _, last = name.rpartition(".")
        return name in self.weights or (
            last in ("lora_A", "lora_B") and f"{layer}.weight" in self.weights
        )

    def end_update(self, version: int) -> WeightProof:
        """Return the digest of what came."""
        tensors = self.received()
        component = self.buckets[0].component
        return WeightProof(
            version=version,
            checksums={component: tensors_digest(tensors, tensors.values())},
            counts={component: len(tensors)},
        )

    def received(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {
            name: tensor
            for bucket in self.buckets
            for name, tensor in zip(bucket.names, bucket.carrier.tensors, strict=True)
        }

    def result(self) -> dict[str, Tensor]:
        """Return the weights after the update, adapters merged."""
        came = self.received()
        held = self.weights | {name: came[name] for name in came if name in self.weights}
        for bucket in self.buckets:
            if bucket.lora is not None:
                scale = bucket.lora.alpha / bucket.lora.rank
                for layer in {name.rpartition(".")[0] for name in bucket.names}:
                    pair = (came[f"{layer}.lora_A"], came[f"{layer}.lora_B"])
                    name = f"{layer}.weight"
                    held[name] = merge_delta(self.weights[name], *pair, scale)
        return held


class UpdaterContract(ContractBase):
    """Buckets, names, versions and failures of one updater, against a client that records.

    An updater that reaches engines in another process overrides ``engines`` (handles that lead to the
    fixture ``client``) and ``plan``.
    """

    @pytest.fixture
    def section(self) -> object:
        """Core's options of ``[sync]``."""
        return None

    @pytest.fixture
    def base(self) -> dict[str, Tensor]:
        """The weights that engine and trainer start from."""
        return {f"{layer}.weight": drawn(i, 6, 4) for i, layer in enumerate(LAYERS)}

    @pytest.fixture
    def client(self, base: dict[str, Tensor]) -> RecordingClient:
        """The receiving end."""
        return RecordingClient({name: tensor.clone() for name, tensor in base.items()})

    @pytest.fixture
    def engines(self, client: RecordingClient) -> Iterator[tuple[EngineHandle, ...]]:
        """Handles of the engines to push to."""
        CLIENTS["contract://engine"] = client
        yield (
            EngineHandle(
                component="recording",
                address="contract://engine",
                capabilities=EngineCapabilities(
                    transports=frozenset({"local"}), payloads=frozenset({"dense", "lora_merge"})
                ),
            ),
        )
        del CLIENTS["contract://engine"]

    @pytest.fixture
    def plan(self, instance: Updater, engines: Sequence[EngineHandle]) -> SyncPlan:
        """A plan that the updater must accept."""
        return SyncPlan(
            trained="full" if instance.payload == "dense" else "adapters",
            placement="same_process",
            components=("transformer",),
            engines=tuple(engine.capabilities for engine in engines),
        )

    @pytest.fixture
    def packs(self, instance: Updater, base: dict[str, Tensor]) -> list[PackedUnits]:
        """What core packs: two buckets of whole units."""
        if instance.payload == "lora":
            pairs = [adapter_pair(layer, place) for place, layer in enumerate(LAYERS)]
            return [joined(pairs[:2]), joined(pairs[2:])]
        trained = {name: tensor + 1 for name, tensor in base.items()}
        units = [PackedUnits(names=(name,), tensors=(t,)) for name, t in trained.items()]
        return [joined(units[:2]), joined(units[2:])]

    @pytest.fixture
    def connected(
        self, instance: Updater, context: Context, engines: Sequence[EngineHandle]
    ) -> Iterator[Updater]:
        """The updater, connected."""
        instance.connect(replace(context, role=Role.TRAIN), engines)
        yield instance
        instance.close()

    def test_it_states_payload_and_transport(self, instance: Updater) -> None:
        assert instance.payload in ("dense", "merged", "lora")
        assert instance.transport

    def test_its_own_plan_is_accepted(self, instance: Updater, plan: SyncPlan) -> None:
        assert instance.accepts(plan) is None

    def test_other_plans_are_refused_with_a_reason(self, instance: Updater, plan: SyncPlan) -> None:
        other = "adapters" if plan.trained == "full" else "full"
        for wrong in (
            replace(plan, trained=other),
            replace(plan, engines=()),
            replace(plan, engines=(EngineCapabilities(),)),
        ):
            assert instance.accepts(wrong)

    def test_the_engine_holds_what_the_trainer_has(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        client.begin_update(1)
        connected.push("transformer", iter(packs), 1)
        expected = trained_weights(client.weights, packs)
        assert client.result().keys() == expected.keys()
        for name, tensor in client.result().items():
            assert torch.equal(tensor, expected[name]), name

    def test_every_bucket_is_labelled_as_it_is(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        client.begin_update(3)
        connected.push("transformer", iter(packs), 3)
        assert [bucket.index for bucket in client.buckets] == [0, 1]
        for bucket, pack in zip(client.buckets, packs, strict=True):
            assert (bucket.component, bucket.version) == ("transformer", 3)
            assert bucket.payload == ("dense" if pack.lora is None else "lora_merge")
            assert bucket.lora == pack.lora
            assert bucket.names == pack.names
            assert bucket.shapes == tuple(tuple(tensor.shape) for tensor in pack.tensors)
            assert set(bucket.dtypes) == {"float32"}
            assert bucket.checksum == tensors_digest(pack.names, pack.tensors)
            assert not any(tensor.requires_grad for tensor in bucket.carrier.tensors)

    def test_units_are_never_split(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        client.begin_update(1)
        connected.push("transformer", iter(packs), 1)
        assert [bucket.names for bucket in client.buckets] == [pack.names for pack in packs]

    def test_the_report_agrees_with_the_engines_proof(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        client.begin_update(1)
        report = connected.push("transformer", iter(packs), 1)
        proof = client.end_update(1)
        assert (report.version, report.component) == (1, "transformer")
        assert report.checksum == proof.checksums["transformer"]
        assert len(report.names) == proof.counts["transformer"]
        assert report.names == tuple(name for pack in packs for name in pack.names)
        assert report.buckets == len(packs)
        assert report.bytes == sum(t.nbytes for pack in packs for t in pack.tensors)
        assert (report.missing, report.unexpected) == ((), ())
        assert report.seconds >= 0

    def test_a_second_push_sends_the_same(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        reports = []
        for version in (1, 2):
            client.begin_update(version)
            reports.append(connected.push("transformer", iter(packs), version))
        assert [report.version for report in reports] == [1, 2]
        assert reports[0].checksum == reports[1].checksum

    def test_names_that_the_engine_lacks_are_in_the_report(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        strange = replace(packs[0], names=tuple(f"module.{name}" for name in packs[0].names))
        client.begin_update(1)
        report = connected.push("transformer", iter([strange, packs[1]]), 1)
        assert report.unexpected == tuple(sorted(strange.names))

    def test_a_failure_still_drains_the_packs(
        self, connected: Updater, client: RecordingClient, packs: list[PackedUnits]
    ) -> None:
        """Making a pack is collective: a rank that stops early leaves the others waiting."""
        client.begin_update(1)
        client.refuse_at = 0
        rest = iter(packs)
        with pytest.raises(EngineError, match="refused"):
            connected.push("transformer", rest, 1)
        assert list(rest) == []

    def test_connecting_again_reaches_the_engines_of_now(
        self,
        connected: Updater,
        context: Context,
        client: RecordingClient,
        engines: Sequence[EngineHandle],
        packs: list[PackedUnits],
    ) -> None:
        connected.connect(context, engines)
        client.begin_update(1)
        assert connected.push("transformer", iter(packs), 1).buckets == len(client.buckets) == 2

    def test_closing_twice_is_harmless(self, connected: Updater) -> None:
        connected.close()
        connected.close()


def drawn(seed: int, *shape: int) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapter_pair(layer: str, seed: int) -> PackedUnits:
    """Return the unit of one adapted layer: A, then B."""
    return PackedUnits(
        names=(f"{layer}.lora_A", f"{layer}.lora_B"),
        tensors=(drawn(10 + seed, 2, 4), drawn(20 + seed, 6, 2)),
        lora=LORA,
    )


def joined(units: Sequence[PackedUnits]) -> PackedUnits:
    """Pack whole units into one bucket's worth."""
    return PackedUnits(
        names=tuple(name for unit in units for name in unit.names),
        tensors=tuple(tensor for unit in units for tensor in unit.tensors),
        lora=units[0].lora,
    )


def trained_weights(base: dict[str, Tensor], packs: Sequence[PackedUnits]) -> dict[str, Tensor]:
    """Return the trainer's weights: what is pushed, or the base with the adapters merged."""
    given = {
        name: tensor
        for pack in packs
        for name, tensor in zip(pack.names, pack.tensors, strict=True)
    }
    if packs[0].lora is None:
        return base | given
    scale = packs[0].lora.alpha / packs[0].lora.rank
    merged = {
        f"{layer}.weight": merge_delta(
            base[f"{layer}.weight"], given[f"{layer}.lora_A"], given[f"{layer}.lora_B"], scale
        )
        for layer in LAYERS
    }
    return base | merged
