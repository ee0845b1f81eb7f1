"""The updater contract fails on updaters that drop, split, mislabel or forget what core packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in

from drl.api import (
    API_VERSION,
    Component,
    Context,
    EngineClient,
    EngineHandle,
    PackedUnits,
    PushReport,
    SyncPlan,
    Updater,
    WeightBucket,
    hookimpl,
)
from drl.catalog import Catalog
from drl.mathematics.checksum import tensors_digest
from drl.testing.contracts.updater import UpdaterContract
from drl.testing.contracts.weights import make_bucket

DRL_API = API_VERSION


class Plain(Updater):
    """An honest updater of full weights; the wrong ones change one thing each."""

    payload = "dense"
    transport = "local"

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.clients: list[EngineClient] = []

    def accepts(self, plan: SyncPlan) -> str | None:
        fits = plan.trained == "full" and plan.engines
        able = all("local" in engine.transports for engine in plan.engines)
        return None if fits and able else "it pushes full weights to engines of this process"

    def connect(self, trainer: Context, engines: Sequence[EngineHandle]) -> None:
        self.clients = [engine.open() for engine in engines]

    def push(self, component: str, buckets: Iterator[PackedUnits], version: int) -> PushReport:
        packs: list[PackedUnits] = []
        unexpected: set[str] = set()
        try:
            for index, pack in enumerate(self.packed(buckets)):
                bucket = self.labelled(pack, component, version, index)
                for client in self.clients:
                    unexpected.update(client.update_weights(bucket).unexpected)
                packs.append(pack)
        finally:
            self.drain(buckets)
        names = [name for pack in packs for name in pack.names]
        tensors = [tensor for pack in packs for tensor in pack.tensors]
        return PushReport(
            version=version,
            component=component,
            names=tuple(names),
            buckets=len(packs),
            bytes=sum(tensor.nbytes for tensor in tensors),
            checksum=tensors_digest(names, tensors),
            unexpected=tuple(sorted(unexpected)),
        )

    def packed(self, buckets: Iterator[PackedUnits]) -> Iterator[PackedUnits]:
        return buckets

    def labelled(self, pack: PackedUnits, component: str, version: int, index: int) -> WeightBucket:
        tensors = dict(zip(pack.names, pack.tensors, strict=True))
        return make_bucket(tensors, version=version, component=component, index=index)

    def drain(self, buckets: Iterator[PackedUnits]) -> None:
        for _ in buckets:
            pass

    def close(self) -> None:
        self.clients = []


class Losing(Plain):
    """Sends the first bucket and believes that it was all."""

    def packed(self, buckets: Iterator[PackedUnits]) -> Iterator[PackedUnits]:
        yield next(buckets)
        self.drain(buckets)


class Splitting(Plain):
    """Makes a bucket of every tensor, wherever the unit ends."""

    def packed(self, buckets: Iterator[PackedUnits]) -> Iterator[PackedUnits]:
        for pack in buckets:
            for name, tensor in zip(pack.names, pack.tensors, strict=True):
                yield PackedUnits(names=(name,), tensors=(tensor,))


class Rounding(Plain):
    """Sends half the bytes."""

    def packed(self, buckets: Iterator[PackedUnits]) -> Iterator[PackedUnits]:
        for pack in buckets:
            yield replace(pack, tensors=tuple(tensor.bfloat16() for tensor in pack.tensors))


class Renaming(Plain):
    """Sends the names of a wrapped module."""

    def packed(self, buckets: Iterator[PackedUnits]) -> Iterator[PackedUnits]:
        for pack in buckets:
            yield replace(pack, names=tuple(f"module.{name}" for name in pack.names))


class Unnumbered(Plain):
    def labelled(self, pack: PackedUnits, component: str, version: int, index: int) -> WeightBucket:
        return super().labelled(pack, component, version, 0)


class Stale(Plain):
    """Labels every push as the first."""

    def labelled(self, pack: PackedUnits, component: str, version: int, index: int) -> WeightBucket:
        return super().labelled(pack, component, 1, index)


class Unproven(Plain):
    """Labels buckets with the checksum of nothing."""

    def labelled(self, pack: PackedUnits, component: str, version: int, index: int) -> WeightBucket:
        bucket = super().labelled(pack, component, version, index)
        return replace(bucket, checksum=tensors_digest([], []))


class Silent(Plain):
    """Keeps to itself which names the engine did not know."""

    def push(self, component: str, buckets: Iterator[PackedUnits], version: int) -> PushReport:
        return replace(super().push(component, buckets, version), unexpected=())


class Impatient(Plain):
    """Leaves at the first failure; the other ranks wait for it for ever."""

    def drain(self, buckets: Iterator[PackedUnits]) -> None:
        return


class Accumulating(Plain):
    """Sends twice after connecting twice."""

    def connect(self, trainer: Context, engines: Sequence[EngineHandle]) -> None:
        self.clients += [engine.open() for engine in engines]


class ClosingOnce(Plain):
    def close(self) -> None:
        assert self.clients, "closed twice"
        super().close()


class Eager(Plain):
    """Takes any plan."""

    def accepts(self, plan: SyncPlan) -> str | None:
        return None


class Shy(Plain):
    def accepts(self, plan: SyncPlan) -> str | None:
        return "not today"


class Estimating(Plain):
    """Reports two bytes for each number, whatever it sent."""

    def push(self, component: str, buckets: Iterator[PackedUnits], version: int) -> PushReport:
        report = super().push(component, buckets, version)
        return replace(report, bytes=report.bytes // 2)


class Drifting(Plain):
    """Adds what it sent last time to what it sends now."""

    sent = 0

    def packed(self, buckets: Iterator[PackedUnits]) -> Iterator[PackedUnits]:
        self.sent += 1
        for pack in buckets:
            moved = tuple(torch.add(tensor, self.sent - 1) for tensor in pack.tensors)
            yield replace(pack, tensors=moved)


HOLDS = "test_the_engine_holds_what_the_trainer_has"
LABELS = "test_every_bucket_is_labelled_as_it_is"
REPORT = "test_the_report_agrees_with_the_engines_proof"

CASES: list[tuple[type[Plain], str, str]] = [
    (Losing, HOLDS, "blocks.1.to_q"),
    (Losing, REPORT, "names"),
    (Splitting, "test_units_are_never_split", "blocks.0.to_q.weight"),
    (Rounding, HOLDS, "torch.equal"),
    (Renaming, HOLDS, "torch.equal"),
    (Renaming, "test_names_that_the_engine_lacks_are_in_the_report", "module.module."),
    (Unnumbered, LABELS, "[0, 0] == [0, 1]"),
    (Stale, LABELS, "('transformer', 1) == ('transformer', 3)"),
    (Unproven, LABELS, "checksum"),
    (Silent, "test_names_that_the_engine_lacks_are_in_the_report", "() == ("),
    (Impatient, "test_a_failure_still_drains_the_packs", "[PackedUnits"),
    (Accumulating, "test_connecting_again_reaches_the_engines_of_now", "2 == 4"),
    (ClosingOnce, "test_closing_twice_is_harmless", "closed twice"),
    (Eager, "test_other_plans_are_refused_with_a_reason", "assert None"),
    (Shy, "test_its_own_plan_is_accepted", "'not today' is None"),
    (Estimating, REPORT, "nbytes"),
    (Drifting, "test_a_second_push_sends_the_same", "checksum"),
]


@hookimpl
def drl_register_updaters() -> list[Component]:
    return offered([Plain, *[case[0] for case in CASES]])


class Checks(UpdaterContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("updater", "plain")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    cases = [(wrong, check) for wrong, check, _ in CASES]
    return judged(Checks, tmp_path_factory.mktemp("checks"), cases, honest=Plain)


def test_an_honest_updater_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["Plain"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {case[1] for case in CASES} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_updater_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Plain], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]
