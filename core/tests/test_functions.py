"""``Functions``: what a recipe chose for each slot, imported once, and fitted to how its slot calls it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config.sections import SECTIONS
from drl.errors import BadInput, BrokenPlugin, ContractError, DrlError, UnknownComponent
from drl.functions import Functions
from drl.kinds import SLOTS
from drl.types import Prompt, Sample

MakePlugin = Callable[..., EntryPoint]
FILTER = "rollout.sample_filter"

MODULE = """
LOADED = []
LOADED.append(1)
seen = []

def two(a, b): seen.append((a, b)); return "two"
async def wait(a, b): return [a, b]
def three(a, b, c): return "three"
def four(a, b, c, d): return "four"
def five(a, b, c, d, e): return "five"
async def make(run, request, sampling): return "made"
async def told(run, request, sampling, *, evaluation=False): return evaluation
def rollout(run, rollout_id, data_source): return "rollout"
def seeds(args, rollout_id, data_source, evaluation=False): return evaluation
class Keeper:
    def __call__(self, run, groups): return "kept"
keeper = Keeper()
number = 3
one = lambda run: None
"""
FITTING = {
    "model.backend": "three",
    "rollout.function": "rollout",
    "rollout.custom_generate": "make",
    "rollout.dynamic_sampling_filter": "two",
    "rollout.sample_filter": "two",
    "rollout.buffer_filter": "four",
    "rollout.custom_convert": "two",
    "rollout.custom_expand": "four",
    "rollout.custom_log": "five",
    "rollout.custom_eval_log": "four",
    "eval.function": "seeds",
    "algorithm.custom_prepare": "two",
    "algorithm.custom_loss": "four",
    "reward.custom": "wait",
    "reward.custom_post_process": "two",
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module acme_functions, forgotten later."""
    (tmp_path / "acme_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("acme_functions", None)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.load()


def chosen(catalog: Catalog, **options: str) -> Functions:
    """Return the functions of a recipe that has these options, ``section__key``, and nothing else."""
    required = {"model": {"checkpoint": "a/b"}, "rollout": {"batch_size": 1}}

    def section(name: str) -> Any:
        start = f"{name}__"
        values = {k.removeprefix(start): v for k, v in options.items() if k.startswith(start)}
        return SECTIONS[name].model_validate({**required.get(name, {}), **values})

    return Functions(SimpleNamespace(section=section), catalog)


def one_of(catalog: Catalog, slot: str, name: str) -> Callable[..., Any]:
    """Return the function of a slot, which must be there."""
    found = chosen(catalog, **{slot.replace(".", "__"): name}).get(slot)
    assert found is not None
    return found


@pytest.mark.parametrize("slot", [slot.option for slot in SLOTS])
def test_each_slot_gives_the_function_that_its_option_names(catalog: Catalog, slot: str) -> None:
    found = one_of(catalog, slot, f"acme_functions:{FITTING[slot]}")
    assert found.__name__ == FITTING[slot]
    assert chosen(catalog).get(slot) is None


def test_every_slot_is_an_option_of_its_section() -> None:
    for slot in SLOTS:
        section, _, key = slot.option.partition(".")
        field = SECTIONS[section].model_fields[key]
        assert field.default is None
        assert "unction" in (field.description or "")


def test_an_option_that_is_no_slot_is_a_mistake_of_the_caller(catalog: Catalog) -> None:
    with pytest.raises(KeyError):
        chosen(catalog, data__source="jsonl").get("data.source")


def test_a_function_is_imported_when_it_is_asked_for_and_once(catalog: Catalog) -> None:
    functions = chosen(catalog, rollout__sample_filter="acme_functions:two")
    assert "acme_functions" not in sys.modules
    first = functions.get(FILTER)
    module = sys.modules["acme_functions"]
    assert first is functions.get(FILTER)
    assert vars(first)["__wrapped__"] is vars(module)["two"]
    assert vars(module)["LOADED"] == [1]


def test_all_are_imported_before_a_run_begins(catalog: Catalog) -> None:
    wrong = chosen(catalog, rollout__sample_filter="acme_functions:two", reward__custom="no:where")
    with pytest.raises(UnknownComponent, match="there is no module 'no'"):
        wrong.load_all()
    chosen(catalog, rollout__sample_filter="acme_functions:two").load_all()


def test_callable_objects_are_functions_too(catalog: Catalog) -> None:
    assert one_of(catalog, FILTER, "acme_functions:keeper")(None, []) == "kept"


def test_arguments_by_name_reach_only_functions_that_take_them(catalog: Catalog) -> None:
    made = one_of(catalog, "rollout.custom_generate", "acme_functions:make")
    assert asyncio.run(made(None, None, None, evaluation=True)) == "made"
    told = one_of(catalog, "rollout.custom_generate", "acme_functions:told")
    assert asyncio.run(told(None, None, None, evaluation=True)) is True
    plain = one_of(catalog, "rollout.function", "acme_functions:rollout")
    assert plain(None, 0, None, evaluation=False) == "rollout"
    assert one_of(catalog, "eval.function", "acme_functions:seeds")(None, 0, None, evaluation=True)
    assert plain.__name__ == "rollout"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acme_functions:Keeper", "acme_functions:Keeper is a class, not a function"),
        ("acme_functions:number", "acme_functions:number is a value, not a function"),
        ("acme_functions:wait", "must not be async"),
        ("acme_functions:four", "needs the argument 'c' too"),
        ("acme_functions:one", "takes 1 argument (run), but is called with (run, groups)"),
        ("builtins:dict", "must be a function"),
        ("acme_functions:none", "acme_functions has no none"),
    ],
)
def test_a_function_that_its_slot_cannot_call_stops_the_start(
    catalog: Catalog, name: str, said: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        one_of(catalog, FILTER, name)
    assert said in str(refusal.value)
    assert refusal.value.exit_code == 2


OFFER = """
from drl.api import Component, hookimpl
DRL_API = (1, 0)

@hookimpl
def drl_register_functions():
    return [Component('mine', 'acme_offered.parts:{name}', summary='Mine.', slot='{slot}')]
"""
PARTS = "def keep(run, groups): return 'mine'\ndef short(groups): ...\nclass Odd: ...\n"


def with_offer(make_plugin: MakePlugin, name: str, slot: str = FILTER) -> Catalog:
    source = OFFER.format(name=name, slot=slot)
    point = make_plugin("acme-offered", source, files={"acme_offered/parts.py": PARTS})
    return Catalog.load(installed=[*entry_points(group="drl.plugins"), point])


def test_a_registered_function_is_given_by_its_name(make_plugin: MakePlugin) -> None:
    catalog = with_offer(make_plugin, "keep")
    assert one_of(catalog, FILTER, "mine")(None, []) == "mine"
    assert catalog.names("function", FILTER) == ["mine"]
    assert catalog.options_model("function", "mine") is None


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("short", ContractError, f"{FILTER}: acme_offered.parts:short takes 1 argument (groups)"),
        ("Odd", ContractError, f"{FILTER}: acme_offered.parts:Odd must be a function"),
        ("gone", BrokenPlugin, "acme-offered 1.0 failed to load: acme_offered.parts has no gone"),
    ],
)
def test_a_plugin_whose_function_is_wrong_is_named(
    make_plugin: MakePlugin, name: str, error: type[DrlError], said: str
) -> None:
    with pytest.raises(error) as refusal:
        one_of(with_offer(make_plugin, name), FILTER, "mine")
    assert said in str(refusal.value)


def test_one_name_may_fill_two_slots_but_not_one_slot_twice(make_plugin: MakePlugin) -> None:
    slots = ("rollout.buffer_filter", "rollout.custom_convert")
    points = [
        make_plugin(f"acme-{n}", OFFER.format(name="keep", slot=slot))
        for n, slot in enumerate((FILTER, *slots))
    ]
    catalog = Catalog.load(installed=points)
    for slot in (FILTER, *slots):
        assert catalog.find("function", "mine", slot).component.slot == slot
    with pytest.raises(UnknownComponent) as unknown:
        catalog.find("function", "mine", "rollout.custom_log")
    assert "no function named 'mine' for rollout.custom_log is installed" in str(unknown.value)
    assert "installed: none" in str(unknown.value)
    twice = [*points, make_plugin("acme-again", OFFER.format(name="keep", slot=FILTER))]
    with pytest.raises(DrlError) as conflict:
        Catalog.load(installed=twice).find("function", "mine", FILTER)
    assert f"function 'mine' for {FILTER} is offered by acme-0 1.0 and by acme-again 1.0" in str(
        conflict.value
    )


def test_the_seeds_name_of_a_removed_sample() -> None:
    sample = Sample(index=0, group_index=0, member=0, prompt=Prompt(row=0, text="x"), seed=0)
    assert sample.remove_sample is False
    sample.remove_sample = True
    assert sample.removed is True
    sample.removed = False
    assert sample.remove_sample is False


def test_an_exception_names_the_option_and_the_function_that_raised_it(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_failing.py").write_text(
        "def keep(run, groups): raise ValueError('no groups')\n"
        "async def score(run, samples): raise KeyError('clip')\n"
    )
    importlib.invalidate_caches()
    keep = one_of(catalog, "rollout.sample_filter", "acme_failing:keep")
    score = one_of(catalog, "reward.custom", "acme_failing:score")
    with pytest.raises(ValueError, match="no groups") as failed:
        keep(None, [])
    assert failed.value.__notes__ == ["raised by rollout.sample_filter = 'acme_failing:keep'"]
    with pytest.raises(KeyError) as missed:
        asyncio.run(score(None, []))
    assert missed.value.__notes__ == ["raised by reward.custom = 'acme_failing:score'"]
    sys.modules.pop("acme_failing", None)
