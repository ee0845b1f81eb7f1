"""Fixtures of ``drl.testing`` for the plain test functions of every member."""

import gc
from collections.abc import Iterator

import pytest

pytest_plugins = ["drl.testing"]


@pytest.fixture(scope="session", autouse=True)
def rates_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests and what they start measure into a file of their own, never into the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRL_RATES", str(tmp_path_factory.mktemp("rates") / "rates.json"))
        yield


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through tests and libraries again and again.

    They are hundreds of thousands of objects that stay to the end: a fifth of the time of a small run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a loop set objects aside at once, and as if nobody had before it; see above."""
    monkeypatch.setattr("drl.collector.PATIENCE_S", 0.0)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
