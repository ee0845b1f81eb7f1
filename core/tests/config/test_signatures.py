"""The signature of a slot's function, read from source and from the function: the same, and compared."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drl.config.signatures import call_text, from_callable, from_source, mismatch, wanted
from drl.kinds import SLOTS

FILTER = "rollout.sample_filter"
GENERATE = "rollout.custom_generate"


def function_of(source: str) -> Any:
    """Return what a definition makes of the name f."""
    place: dict[str, Any] = {}
    exec(source, place)
    return place["f"]


def node_of(source: str) -> Any:
    """Return the statement of a definition."""
    return ast.parse(source).body[0]


def said(slot: str, source: str) -> str | None:
    """Return what is wrong with a function, which source and object must agree on."""
    from_text = mismatch(slot, "my.module:f", from_source(node_of(source)))
    assert from_text == mismatch(slot, "my.module:f", from_callable(function_of(source)))
    return from_text


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(NAMES, st.data())
def test_source_and_function_say_the_same(names: list[str], data: st.DataObject) -> None:
    def cut() -> int:
        return data.draw(st.integers(0, len(names)))

    first, second = sorted((cut(), cut()))
    defaults = cut()
    positional = [f"{n}=0" if i >= defaults else n for i, n in enumerate(names[:second])]
    if first > 0:
        positional.insert(first, "/")
    only = [f"{n}=0" if data.draw(st.booleans()) else n for n in names[second:]]
    star = data.draw(st.sampled_from(["*rest", "*"] if only else ["*rest", ""]))
    words = data.draw(st.sampled_from(["**more", ""]))
    arguments = ", ".join(filter(None, [*positional, star, *only, words]))
    prefix = data.draw(st.sampled_from(["", "async "]))
    source = f"{prefix}def f({arguments}): ..."
    assert from_source(node_of(source)) == from_callable(function_of(source))


@pytest.mark.parametrize("slot", [slot.option for slot in SLOTS])
def test_a_function_written_as_the_slot_is_called_fits(slot: str) -> None:
    asked = wanted(slot)
    given_by_name = [f"{name}=None" for name in asked.keywords]
    star = ["*"] if given_by_name else []
    prefix = "async " if asked.asynchronous else ""
    names = [f"x{n}" for n in range(len(asked.positional))]
    for arguments in ([*names, *star, *given_by_name], ["*anything", "**more"], names):
        assert said(slot, f"{prefix}def f({', '.join(arguments)}): ...") is None
    assert asked.required == len(asked.positional) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("groups", "takes 1 argument (groups), but is called with (run, groups)"),
        ("", "takes 0 arguments, but is called with (run, groups)"),
        ("a, b, c", "needs the argument 'c' too, but is called with (run, groups)"),
        ("a, b, *, c", "needs the argument 'c' too, but is called with (run, groups)"),
        ("a, *, groups", "takes 1 argument (a), but is called with (run, groups)"),
        ("run, groups", None),
        ("run, groups, more=1", None),
        ("run, groups=(), *, more=1", None),
        ("run, *groups", None),
        ("run, groups, /", None),
    ],
)
def test_too_few_and_too_many_arguments_are_named(arguments: str, words: str | None) -> None:
    found = said(FILTER, f"def f({arguments}): ...")
    assert found == (None if words is None else f"my.module:f {words}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(run, request, sampling): ...", "must be async, because drl awaits it"),
        ("async def f(run, request, sampling): ...", None),
        ("async def f(run, request, sampling, evaluation): ...", None),
        ("async def f(run, request, sampling, *, evaluation): ...", None),
        ("async def f(run, request, sampling, **words): ...", None),
        ("async def f(run, request, sampling, *, other): ...", "needs the argument 'other' too"),
        ("async def f(run, request): ...", "called with (run, request, sampling, evaluation=…)"),
    ],
)
def test_what_is_given_by_name_may_be_left_out(source: str, words: str | None) -> None:
    found = said(GENERATE, source)
    assert (found is None) if words is None else (found is not None and words in found)


def test_async_where_nobody_waits_is_refused() -> None:
    found = said(FILTER, "async def f(run, groups): ...")
    assert found == "my.module:f must not be async, because drl does not await it: write 'def'"


def keep(run: Any, groups: Any) -> None:
    """A filter."""


async def score(run: Any, samples: Any) -> list[float]:
    """A reward."""
    return []


class Keeper:
    """A callable object."""

    def __call__(self, run: Any, groups: Any) -> None:
        """Keep all."""


class Scorer:
    """A callable object that is awaited."""

    async def __call__(self, run: Any, samples: Any) -> list[float]:
        """Score nothing."""
        return []


@functools.wraps(score)
def wrapped(*arguments: Any) -> Any:
    return score(*arguments)


def test_objects_that_can_be_called_are_read_as_such() -> None:
    def unfit(extra: Any, run: Any, groups: Any) -> None: ...

    for fits in (keep, Keeper(), functools.partial(unfit, 1), Keeper().__call__):
        assert mismatch(FILTER, "x", from_callable(fits)) is None
    for fits in (score, Scorer(), wrapped, functools.partial(score)):
        assert from_callable(fits).asynchronous
        assert mismatch("reward.custom", "x", from_callable(fits)) is None
    assert not from_callable(functools.partial(keep)).asynchronous


def test_the_call_of_a_slot_in_words() -> None:
    assert call_text(FILTER) == "(run, groups)"
    assert call_text("rollout.function") == "(run, rollout_id, data_source, evaluation=…)"


def test_every_protocol_has_typed_arguments_and_words() -> None:
    import importlib

    for slot in SLOTS:
        module, _, name = slot.interface.partition(":")
        protocol = vars(importlib.import_module(module))[name]
        signature = inspect.signature(protocol.__call__)
        assert (protocol.__doc__ or "").strip()
        assert (protocol.__call__.__doc__ or "").strip()
        assert signature.return_annotation is not inspect.Signature.empty
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        assert set(kinds) <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY}
        assert slot.summary.endswith(".")
