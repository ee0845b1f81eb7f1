"""Fixtures for plain test functions; contract classes bring their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drl.catalog import Catalog
from drl.testing.builders import make_pair, make_prompt, make_sample
from drl.types import Pair, Prompt, Sample


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    """Everything that is installed, loaded once."""
    return Catalog.load()


@pytest.fixture(name="make_prompt")
def prompt_builder() -> Callable[..., Prompt]:
    """``drl.testing.make_prompt``, as a fixture."""
    return make_prompt


@pytest.fixture(name="make_sample")
def sample_builder() -> Callable[..., Sample]:
    """``drl.testing.make_sample``, as a fixture."""
    return make_sample


@pytest.fixture(name="make_pair")
def pair_builder() -> Callable[..., Pair]:
    """``drl.testing.make_pair``, as a fixture."""
    return make_pair
