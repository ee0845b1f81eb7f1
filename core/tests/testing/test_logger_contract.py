"""The logger contract fails on loggers that lose, round or change figures, or close only once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

import pytest
from contract_runs import Verdict, judged, offered, plugin_in

from drl.api import API_VERSION, Component, Context, Logger, RunFacts, Sample, hookimpl
from drl.catalog import Catalog
from drl.testing.contracts.logger import LoggerContract

DRL_API = API_VERSION
FILE = "figures.txt"


class Lines(Logger):
    """An honest logger: a line of JSON per iteration. The wrong ones change one thing each."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.file: TextIO | None = None

    def start(self, run: RunFacts) -> None:
        self.file = (run.run_dir / FILE).open("w")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        assert self.file is not None
        self.file.write(json.dumps([step, dict(values)]) + "\n")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class Abandoning(Lines):
    """Writes an iteration when the next one comes, and forgets the last."""

    held: tuple[int, Mapping[str, float]] | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.held is not None:
            super().metrics(*self.held)
        self.held = step, dict(values)


class Rounding(Lines):
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        super().metrics(step, {name: round(value, 4) for name, value in values.items()})


class Numbering(Lines):
    """Counts calls instead of taking the number it is given, from one."""

    calls = 0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        super().metrics(self.calls, values)


class Tagging(Lines):
    """Writes its own note into the figures of everybody."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        super().metrics(step, values)
        values["logged"] = 1.0  # type: ignore[index]


class Summarising(Lines):
    """Needs at least one figure."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        super().metrics(step, {**values, "largest": max(values.values())})


class ClosingOnce(Lines):
    def close(self) -> None:
        assert self.file is not None, "closed twice"
        super().close()


class Blind(Lines):
    """Believes that pictures and phases are for somebody else."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        raise NotImplementedError("no pictures")


class FromTheStart(Lines):
    """Keeps a row per iteration since the first, which a resumed run does not have."""

    def start(self, run: RunFacts) -> None:
        super().start(run)
        self.rows: list[Mapping[str, float]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        super().metrics(step, values)
        self.rows.append(values)
        assert self.rows[step] is values


LOSES = "test_loses_nothing_on_close"
TAKES = "test_takes_figures_samples_phases_and_events"

CASES: list[tuple[type[Lines], str, str]] = [
    (Abandoning, LOSES, "[0, 1] == [0, 1, 2]"),
    (Rounding, LOSES, "-1e-07"),
    (Numbering, LOSES, "[1, 2, 3] == [0, 1, 2]"),
    (Tagging, "test_leaves_the_figures_as_they_are", "{'logged': 1.0}"),
    (Summarising, "test_takes_an_iteration_without_figures", "ValueError"),
    (ClosingOnce, "test_a_second_close_is_harmless", "closed twice"),
    (ClosingOnce, "test_closing_before_the_start_is_harmless", "closed twice"),
    (Blind, TAKES, "no pictures"),
    (FromTheStart, "test_may_start_in_the_middle_of_a_run", "IndexError"),
]


@hookimpl
def drl_register_loggers() -> list[Component]:
    return offered([Lines, *[case[0] for case in CASES]])


class Checks(LoggerContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("logger", "lines")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def read_back(self, tmp_path: Path) -> Callable[[], Mapping[int, Mapping[str, float]]]:
        return lambda: dict(json.loads(line) for line in (tmp_path / FILE).open())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    cases = [(wrong, check) for wrong, check, _ in CASES]
    return judged(Checks, tmp_path_factory.mktemp("checks"), cases, honest=Lines)


def test_an_honest_logger_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["Lines"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {case[1] for case in CASES} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_logger_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Lines], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]


def test_a_logger_that_cannot_be_read_back_may_say_so(tmp_path: Path) -> None:
    stated = {"capabilities": {"reads_back": False}}
    found = judged(Checks, tmp_path, [(Rounding, LOSES)], honest=Rounding, members=stated)
    assert "states reads_back = False" in found["Rounding"].skipped[LOSES]
