"""A tiny SD3 pipeline, and engines on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drl.api import Context, Family, Launch, Prompt, RolloutRequest, Sample, Sampling, SdeBackend
from drl.catalog import Catalog
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_family_sd3.tiny import build_random


@pytest.fixture(scope="session")
def installed() -> Catalog:
    return Catalog.load()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-sd3")
    build_random(path, seed=0)
    return str(path)


@pytest.fixture(scope="session")
def family(installed: Catalog) -> Family:
    model = installed.options_model("family", "sd3")
    assert model is not None
    made: Family = installed.create(
        "family", "sd3", model.model_validate({"decode_rows": 4}), Context()
    )
    return made


def backends(installed: Catalog, *kinds: str, no_const: bool) -> dict[str, SdeBackend]:
    section = SimpleNamespace(noise_level=0.7, log_prob_no_const=no_const)
    context = Context(section=section)
    return {kind: installed.create("sde_backend", kind, None, context) for kind in kinds}


@pytest.fixture(scope="session")
def tiny_launch(installed: Catalog, checkpoint: str, family: Family) -> Launch:
    kinds = backends(installed, "sde", "ode", no_const=False)
    return Launch(checkpoint=checkpoint, family=family, sde_backends=kinds)


@pytest.fixture(scope="session")
def cps_launch(installed: Catalog, checkpoint: str, family: Family) -> Launch:
    kinds = backends(installed, "cps", "ode", no_const=True)
    return Launch(checkpoint=checkpoint, family=family, sde_backends=kinds)


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return asyncio.run


@pytest.fixture
def engine(tiny_launch: Launch) -> Iterator[LocalEngine]:
    """An engine of four rows, started."""
    made = LocalEngine(LocalOptions.model_validate({"rows": 4, "wait_ms": 2}), Context())
    asyncio.run(made.start(tiny_launch))
    yield made
    asyncio.run(made.stop())


@pytest.fixture
def sampling() -> Sampling:
    return Sampling(num_steps=4, height=32, width=32, sde_type="sde", noise_level=0.7)


@pytest.fixture
def request_for(sampling: Sampling) -> Callable[..., RolloutRequest]:
    def made(*seeds: int, text: str = "a sign", **changes: Any) -> RolloutRequest:
        fields: dict[str, Any] = {"sampling": sampling, "group_index": 0} | changes
        members = tuple(range(len(seeds)))
        return RolloutRequest(
            prompt=Prompt(row=0, text=text), members=members, seeds=seeds, **fields
        )

    return made


@pytest.fixture
def ask(
    engine: LocalEngine, request_for: Callable[..., RolloutRequest]
) -> Callable[..., list[Sample]]:
    def asked(*seeds: int, **changes: Any) -> list[Sample]:
        return asyncio.run(engine.generate(request_for(*seeds, **changes)))

    return asked
