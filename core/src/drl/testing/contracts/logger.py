"""``LoggerContract``: figures arrive, and closing is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from drl.interfaces.logger import Logger, RunFacts
from drl.testing.contracts.base import ContractBase
from drl.types import Sample

FIGURES: Mapping[str, float] = {
    "rollout/reward/raw_mean": 0.5,
    "rollout/reward/raw_std": 0.25,
    "train/loss": -1e-7,
    "train/ratio_mean": 1.0,
    "perf/step_time": 2.0,
    "eval/words": 0.75,
}


class LoggerContract(ContractBase):
    """The author overrides ``read_back`` when what was logged can be read again.

    Capability: ``reads_back``.
    """

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunFacts:
        """A run of three iterations."""
        return facts(tmp_path, first=0)

    @pytest.fixture
    def logger(self, instance: Logger, run: RunFacts) -> Iterator[Logger]:
        """The logger, started; closed after the test."""
        instance.start(run)
        yield instance
        instance.close()

    @pytest.fixture
    def read_back(self, tmp_path: Path) -> Callable[[], Mapping[int, Mapping[str, float]]]:
        """Returns what was logged, by step, once the logger is closed."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture read_back")

    def test_takes_figures_samples_phases_and_events(
        self, logger: Logger, make_sample: Callable[..., Sample]
    ) -> None:
        for step in range(3):
            logger.phase(step, "rollout", 1, 2)
            logger.samples(step, [make_sample()])
            logger.metrics(step, FIGURES)
        logger.event("saved")

    def test_takes_an_iteration_without_figures(self, logger: Logger) -> None:
        logger.metrics(0, {})

    def test_leaves_the_figures_as_they_are(self, logger: Logger) -> None:
        given = dict(FIGURES)
        logger.metrics(0, given)
        assert given == FIGURES

    def test_loses_nothing_on_close(self, logger: Logger, request: pytest.FixtureRequest) -> None:
        self.require("reads_back")
        for step in range(3):
            logger.metrics(step, {**FIGURES, "train/ratio_mean": float(step)})
        logger.close()
        logged = request.getfixturevalue("read_back")()
        assert sorted(logged) == [0, 1, 2]
        for step in range(3):
            assert dict(logged[step]) == {**FIGURES, "train/ratio_mean": float(step)}

    def test_a_second_close_is_harmless(self, logger: Logger) -> None:
        logger.close()
        logger.close()

    def test_closing_before_the_start_is_harmless(self, instance: Logger) -> None:
        instance.close()

    def test_may_start_in_the_middle_of_a_run(self, instance: Logger, tmp_path: Path) -> None:
        instance.start(facts(tmp_path, first=2))
        instance.metrics(2, FIGURES)
        instance.close()


def facts(run_dir: Path, *, first: int) -> RunFacts:
    """Return the facts of a run of three iterations."""
    return RunFacts(name="contract", run_dir=run_dir, recipe={}, first=first, total=3)
