"""The conformance kit: a contract class per kind, builders of test data, and isolated discovery.

A plugin's ``tests/test_contract.py`` subclasses the contracts of ``drl.testing.contracts``; nothing
else is needed for them. ``pytest_plugins = ["drl.testing"]`` in the top-level ``conftest.py`` brings
the fixtures ``catalog``, ``make_prompt``, ``make_sample`` and ``make_pair`` to plain test functions.
"""

from __future__ import annotations

import pytest

# Without this a failing contract shows a bare AssertionError; it must run before they are imported.
pytest.register_assert_rewrite("drl.testing.contracts")

from drl.testing.builders import make_pair, make_prompt, make_sample  # noqa: E402
from drl.testing.fixtures import (  # noqa: E402
    catalog,
    pair_builder,
    prompt_builder,
    sample_builder,
)
from drl.testing.isolation import only_plugins  # noqa: E402

__all__ = [
    "catalog",
    "make_pair",
    "make_prompt",
    "make_sample",
    "only_plugins",
    "pair_builder",
    "prompt_builder",
    "sample_builder",
]
