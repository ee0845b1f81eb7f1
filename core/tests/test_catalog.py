"""From names to components, and every message on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from drl.catalog import Catalog, known_plugins, nearest_name
from drl.errors import BrokenPlugin, ComponentConflict, ContractError, UnknownComponent
from drl.plugins import GROUP
from drl.testing import only_plugins
from drl.testing.distributions import MINIMAL_PLUGIN as REWARD
from drl.testing.distributions import write_distribution
from drl.types import Context

MakePlugin = Callable[..., EntryPoint]

CLASS = """
from drl.api import Reward, Score

class Tone(Reward):
    async def score(self, samples):
        return [Score(1.0) for _ in samples]
"""
OPTIONS = """
from drl.options import Field, Options

class ToneOptions(Options):
    target: float = Field(1.0, ge=0, le=1, description='Brightness that scores 1.')
"""
WITH_OPTIONS = REWARD.replace("'How bright.'", "'How bright.', config='tone.config:ToneOptions'")
FILES = {"tone/__init__.py": "", "tone/reward.py": CLASS, "tone/config.py": OPTIONS}


def offering(kind: str, name: str) -> str:
    return REWARD.replace("drl_register_rewards", f"drl_register_{kind}").replace(
        "'tone'", f"'{name}'"
    )


def test_a_component_is_found_by_kind_and_name(make_plugin: MakePlugin) -> None:
    catalog = Catalog.load(installed=[make_plugin("acme-tone", REWARD)])
    entry = catalog.find("reward", "tone")
    assert entry.component.target == "tone.reward:Tone"
    assert entry.owner == "acme-tone 1.0"
    assert catalog.names("reward") == ["tone"]
    assert catalog.names("loss") == []


def test_entries_are_sorted_by_kind_and_name(make_plugin: MakePlugin) -> None:
    points = [
        make_plugin("acme-b", offering("rewards", "zebra")),
        make_plugin("acme-c", offering("rewards", "ant")),
        make_plugin("acme-a", offering("losses", "owl")),
    ]
    catalog = Catalog.load(installed=points)
    assert [(e.kind, e.component.name) for e in catalog.entries()] == [
        ("loss", "owl"),
        ("reward", "ant"),
        ("reward", "zebra"),
    ]
    assert [e.component.name for e in catalog.entries("loss")] == ["owl"]
    assert catalog.distributions == [("acme-a", "1.0"), ("acme-b", "1.0"), ("acme-c", "1.0")]


def test_a_typing_mistake_gets_the_nearest_name(make_plugin: MakePlugin) -> None:
    point = make_plugin("acme-cosmos", offering("families", "cosmos3"))
    with pytest.raises(UnknownComponent) as caught:
        Catalog.load(installed=[point]).find("family", "cosmos-3")
    assert str(caught.value) == (
        "no family named 'cosmos-3' is installed\n  did you mean 'cosmos3'?\n  installed: cosmos3"
    )


def test_a_known_component_gets_its_package(make_plugin: MakePlugin) -> None:
    catalog = Catalog.load(installed=[make_plugin("acme-tone", REWARD)])
    with pytest.raises(UnknownComponent) as caught:
        catalog.find("reward", "ocr")
    assert str(caught.value) == (
        "no reward named 'ocr' is installed\n"
        "  it ships in its own package:  pip install drl-reward-ocr\n"
        "  installed: tone"
    )


def test_a_misspelt_known_component_gets_name_and_package() -> None:
    with pytest.raises(UnknownComponent) as caught:
        Catalog.load(installed=[]).find("reward", "jpegg")
    assert str(caught.value) == (
        "no reward named 'jpegg' is installed\n"
        "  did you mean 'jpeg'?\n"
        "  it ships in its own package:  pip install drl-reward-jpeg\n"
        "  installed: none"
    )


@pytest.mark.parametrize("typed", ["drl-evil", "clip_score", "numpy", "x", "ignore; rm"])
def test_no_package_is_made_up_from_what_was_typed(typed: str) -> None:
    with pytest.raises(UnknownComponent) as caught:
        Catalog.load(installed=[]).find("reward", typed)
    assert "pip install" not in str(caught.value)


def test_a_switched_off_component_says_so() -> None:
    with pytest.raises(UnknownComponent, match="drl-reward-ocr has it, but is switched off"):
        Catalog.load(["drl-reward-ocr"]).find("reward", "ocr")


def test_failed_plugins_stand_below_an_unknown_name(make_plugin: MakePlugin) -> None:
    points = [make_plugin("acme-tone", REWARD), make_plugin("acme-broken", "import nowhere_at_all")]
    with pytest.raises(UnknownComponent) as caught:
        Catalog.load(installed=points).find("reward", "hue")
    assert str(caught.value).splitlines()[2:] == [
        "  acme-broken 1.0 failed to load: ModuleNotFoundError: No module named 'nowhere_at_all'",
        "  see the whole traceback:  drl plugins doctor",
    ]


def test_a_known_component_of_a_failed_plugin_is_not_available(make_plugin: MakePlugin) -> None:
    hidden = {"acme_hidden.py": "import cosmos_guardrail"}
    point = make_plugin(
        "drl-reward-ocr", "", version="0.1.0", entry_point="acme_hidden", files=hidden
    )
    with pytest.raises(BrokenPlugin) as caught:
        Catalog.load(installed=[point]).find("reward", "ocr")
    assert str(caught.value) == (
        "'ocr' is not available\n"
        "  drl-reward-ocr 0.1.0 failed to load: "
        "ModuleNotFoundError: No module named 'cosmos_guardrail'\n"
        "  see the whole traceback:  drl plugins doctor drl-reward-ocr"
    )


def test_two_owners_of_one_name_are_refused(make_plugin: MakePlugin) -> None:
    ours = {"acme_ours.py": offering("families", "sd3")}
    points = [
        make_plugin("drl-family-sd3", "", version="0.1.0", entry_point="acme_ours", files=ours),
        make_plugin("acme-drl", offering("families", "sd3"), version="2.0"),
    ]
    catalog = Catalog.load(installed=points)
    with pytest.raises(ComponentConflict) as caught:
        catalog.find("family", "sd3")
    text = str(caught.value)
    assert text.startswith("family 'sd3' is offered by ")
    assert "drl-family-sd3 0.1.0" in text
    assert "acme-drl 2.0" in text
    assert text.endswith("switch one off: --without acme-drl")


def test_two_owners_of_another_name_do_no_harm(make_plugin: MakePlugin) -> None:
    points = [
        make_plugin("acme-a", offering("rewards", "twice")),
        make_plugin("acme-b", offering("rewards", "twice")),
        make_plugin("acme-tone", REWARD),
    ]
    assert Catalog.load(installed=points).find("reward", "tone").distribution == "acme-tone"


def test_a_name_is_unique_within_its_section(make_plugin: MakePlugin) -> None:
    points = [
        make_plugin("acme-a", offering("sde_backends", "twin")),
        make_plugin("acme-b", offering("step_strategies", "twin")),
    ]
    with pytest.raises(ComponentConflict) as caught:
        Catalog.load(installed=points).find("step_strategy", "twin")
    assert str(caught.value) == (
        "'twin' is step strategy of acme-b 1.0 and SDE backend of acme-a 1.0, and both would have "
        "their options in [sde.twin]; switch one off: --without acme-a"
    )


def test_the_same_name_in_two_sections_is_fine(make_plugin: MakePlugin) -> None:
    points = [
        make_plugin("acme-a", offering("rewards", "twin")),
        make_plugin("acme-b", offering("losses", "twin")),
    ]
    catalog = Catalog.load(installed=points)
    assert catalog.find("reward", "twin").distribution == "acme-a"
    assert catalog.find("loss", "twin").distribution == "acme-b"


def test_a_name_must_not_be_a_core_option_of_its_section(make_plugin: MakePlugin) -> None:
    source = offering("losses", "kl_beta")
    point = make_plugin("acme-a", source.replace("'How bright.'", "'How.', config='a.b:Options'"))
    with pytest.raises(ComponentConflict) as caught:
        Catalog.load(installed=[point]).find("loss", "kl_beta")
    assert "loss 'kl_beta' of acme-a 1.0 has the name of the core option algorithm.kl_beta" in str(
        caught.value
    )
    assert "--without acme-a" in str(caught.value)


def test_options_come_from_the_light_module_alone(make_plugin: MakePlugin) -> None:
    files = {**FILES, "tone/reward.py": "1 / 0"}
    catalog = Catalog.load(installed=[make_plugin("acme-tone", WITH_OPTIONS, files=files)])
    model = catalog.options_model("reward", "tone")
    assert model is not None
    assert model.model_validate({}).model_dump() == {"target": 1.0}


def test_a_component_without_options_has_no_model(make_plugin: MakePlugin) -> None:
    catalog = Catalog.load(installed=[make_plugin("acme-tone", REWARD)])
    assert catalog.options_model("reward", "tone") is None


def test_a_component_is_made_with_options_and_context(make_plugin: MakePlugin) -> None:
    catalog = Catalog.load(installed=[make_plugin("acme-tone", WITH_OPTIONS, files=FILES)])
    context = Context(seed=5)
    reward = catalog.create("reward", "tone", "options", context)
    assert type(reward).__name__ == "Tone"
    assert reward.options == "options"
    assert reward.context is context


def test_a_class_that_fails_to_import_names_its_owner(make_plugin: MakePlugin) -> None:
    files = {**FILES, "tone/reward.py": "import nowhere_at_all"}
    catalog = Catalog.load(installed=[make_plugin("acme-tone", REWARD, files=files)])
    with pytest.raises(BrokenPlugin) as caught:
        catalog.create("reward", "tone", None, Context())
    assert str(caught.value) == (
        "'tone' is not available\n"
        "  acme-tone 1.0 failed to load: ModuleNotFoundError: No module named 'nowhere_at_all'\n"
        "  see the whole traceback:  drl plugins doctor acme-tone"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_class_that_is_absent_names_its_owner(make_plugin: MakePlugin) -> None:
    files = {**FILES, "tone/reward.py": ""}
    catalog = Catalog.load(installed=[make_plugin("acme-tone", REWARD, files=files)])
    with pytest.raises(
        BrokenPlugin, match=r"acme-tone 1.0 failed to load: tone.reward has no Tone"
    ):
        catalog.create("reward", "tone", None, Context())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Tone: pass", "must derive from drl.api.Reward"),
        ("Tone = 3", "must derive from drl.api.Reward"),
        ("from drl.api import Reward\nclass Tone(Reward): pass", "tone.reward:Tone lacks score"),
    ],
)
def test_a_class_of_another_kind_is_refused(
    make_plugin: MakePlugin, source: str, said: str
) -> None:
    files = {**FILES, "tone/reward.py": source}
    catalog = Catalog.load(installed=[make_plugin("acme-tone", REWARD, files=files)])
    with pytest.raises(ContractError, match=said):
        catalog.component_class("reward", "tone")


def test_an_option_model_of_another_base_is_refused(make_plugin: MakePlugin) -> None:
    files = {**FILES, "tone/config.py": "class ToneOptions: pass"}
    catalog = Catalog.load(installed=[make_plugin("acme-tone", WITH_OPTIONS, files=files)])
    with pytest.raises(ContractError, match=r"must derive from drl.options.Options"):
        catalog.options_model("reward", "tone")


def test_listing_imports_no_component_and_no_pydantic(make_plugin: MakePlugin) -> None:
    catalog = Catalog.load(installed=[make_plugin("acme-tone", WITH_OPTIONS, files=FILES)])
    assert catalog.entries()
    assert "tone" not in sys.modules


def test_one_broken_option_model_does_not_hide_the_others(make_plugin: MakePlugin) -> None:
    points = [
        make_plugin("acme-tone", WITH_OPTIONS, files={**FILES, "tone/config.py": "1 / 0"}),
        make_plugin("acme-b", offering("rewards", "other")),
    ]
    catalog = Catalog.load(installed=points)
    assert catalog.options_model("reward", "other") is None
    with pytest.raises(BrokenPlugin, match="ZeroDivisionError"):
        catalog.options_model("reward", "tone")


def test_only_plugins_hides_all_others() -> None:
    with only_plugins("drl-core") as catalog:
        assert {distribution for distribution, _ in catalog.distributions} == {"drl-core"}
        assert catalog.entries() == Catalog.load().entries()
    assert len(Catalog.load().distributions) > 1


def test_only_plugins_knows_what_is_installed() -> None:
    with pytest.raises(ValueError, match="acme-absent"), only_plugins("acme-absent"):
        pass


def test_known_plugins_give_a_distribution_for_each_name() -> None:
    known = known_plugins()
    assert known["reward", "ocr"] == "drl-reward-ocr"
    assert all(name == name.lower() for _, name in known)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("qwen-image", "qwen_image"), ("OCR", "ocr"), ("sd35", "sd3"), ("zz", None)],
)
def test_nearest_name(given: str, meant: str | None) -> None:
    assert nearest_name(given, ["ocr", "qwen_image", "sd3", "wan2_2"]) == meant


def test_every_builtin_and_member_is_loaded_through_entry_points() -> None:
    assert Catalog.load(installed=[]).entries() == []
    assert len(entry_points(group=GROUP)) >= len(Catalog.load().distributions)


def test_what_a_class_lacks_is_listed_in_order(make_plugin: MakePlugin) -> None:
    source = "from drl.api import DataSource\nclass Tone(DataSource):\n    pass\n"
    body = offering("data_sources", "tone").replace("tone.reward:", "tone.source:")
    files = {"tone/__init__.py": "", "tone/source.py": source}
    catalog = Catalog.load(installed=[make_plugin("acme-tone", body, files=files)])
    with pytest.raises(ContractError) as refusal:
        catalog.component_class("data_source", "tone")
    lacks = str(refusal.value).partition(" lacks ")[2].split(", ")
    assert len(lacks) > 2
    assert lacks == sorted(lacks)


def test_distributions_are_listed_once_each(make_plugin: MakePlugin) -> None:
    points = [make_plugin("acme-b", REWARD, version="2"), make_plugin("acme-a", "DRL_API = (1, 0)")]
    first = points[0]
    twice = EntryPoint(name="again", value="acme_a.plugin", group=GROUP)
    assert first.dist is not None
    catalog = Catalog.load(installed=[*points, twice._for(points[1].dist)])  # type: ignore[attr-defined]
    assert catalog.distributions == [("acme-a", "1.0"), ("acme-b", "2")]


def test_names_of_another_kind_are_no_suggestion_with_a_package() -> None:
    with only_plugins("drl-core") as catalog, pytest.raises(UnknownComponent) as refusal:
        catalog.find("loss", "jpeg")  # a reward
    assert "pip install" not in str(refusal.value)
    assert f"installed: {', '.join(catalog.names('loss')) or 'none'}" in str(refusal.value)


def test_a_name_that_is_installed_is_suggested_without_a_package(catalog: Catalog) -> None:
    with pytest.raises(UnknownComponent) as refusal:
        catalog.find("reward", "jpge")
    lines = str(refusal.value).splitlines()
    assert lines[1].strip() == "did you mean 'jpeg'?"
    assert lines[2].strip().startswith("installed: ")
    assert lines[2].strip().removeprefix("installed: ").split(", ") == catalog.names("reward")


def test_of_two_known_owners_the_other_one_is_to_be_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        write_distribution(
            tmp_path,
            f"drl-reward-{name}",
            {f"acme_known_{name}.py": REWARD.replace("tone", "jpeg")},
            entry_point=f"acme_known_{name}",
        )
        for name in ("jpeg", "ocr")
    ]
    catalog = Catalog.load(installed=points)
    with pytest.raises(ComponentConflict) as conflict:
        catalog.find("reward", "jpeg")
    assert str(conflict.value) == (
        "reward 'jpeg' is offered by drl-reward-jpeg 1.0 and by drl-reward-ocr 1.0; "
        "switch one off: --without drl-reward-ocr"
    )


def test_questions_to_plugins_keep_the_owner_of_each_answer(make_plugin: MakePlugin) -> None:
    body = "\n@hookimpl\ndef drl_report_header(recipe):\n    return {0}\n"
    silent, loud = REWARD + body.format("None"), REWARD.replace("tone", "loud") + body.format("[1]")
    catalog = Catalog.load(installed=[make_plugin("acme-a", silent), make_plugin("acme-b", loud)])
    assert catalog.ask("drl_report_header", {"recipe": None}) == [("acme-b", [1])]
