"""Explanations, the JSON schema and the option table, all from the same models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config.explain import explain
from drl.config.flags import flag_rows
from drl.config.schema import BY_PATH, recipe_schema
from drl.config.sections import SECTIONS
from drl.config.table import option_table
from drl.errors import BadInput
from drl.kinds import FUNCTION, KINDS, SLOTS
from drl.testing.distributions import MINIMAL_PLUGIN

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
START, END = "<!-- options: begin -->", "<!-- options: end -->"


def test_an_option_has_type_default_limits_help_and_owner(catalog: Catalog) -> None:
    assert explain("rollout.batch_size", catalog).splitlines() == [
        "rollout.batch_size",
        "  Prompts per rollout.",
        "  type     whole number",
        "  default  required",
        "  limits   above 0",
        "  owner    drl-core",
    ]


def test_an_option_that_takes_a_function_says_how_it_is_called_and_which_there_are(
    catalog: Catalog,
) -> None:
    lines = explain("rollout.dynamic_sampling_filter", catalog).splitlines()
    assert "  type     name of a function, or package.module:function" in lines
    assert "  called   (run, group)" in lines
    assert "  names    zero_std" in lines
    assert "  names    none is registered" in explain("rollout.sample_filter", catalog)
    # given by name, and only to a function that takes it
    assert "(run, request, sampling, evaluation=…)" in explain("rollout.custom_generate", catalog)


def test_an_option_that_picks_components_names_those_that_are_installed(catalog: Catalog) -> None:
    text = explain("algorithm.advantage_estimator", catalog)
    assert "  type     name of a component, or package.module:Class\n  names    gdpo, grpo" in text
    loggers = explain("logging.loggers", catalog)
    assert "  type     list, each a name of a component, or package.module:Class" in loggers
    assert re.search(r"names +console, jsonl", loggers)


def test_an_option_of_a_plugin_names_its_distribution(catalog: Catalog) -> None:
    text = explain("algorithm.policy_loss.clip_range", catalog)
    assert "owner    drl-loss-flow-grpo 0.1.0" in text
    assert "default  0.0001" in text


def test_a_section_lists_options_and_components(catalog: Catalog) -> None:
    text = explain("sde", catalog)
    assert "noise_level = 0.7" in text
    assert "sde.type picks one of (sde backends):" in text
    assert "(drl-sde-cps)" in text


def test_a_table_of_a_component_lists_its_options(catalog: Catalog) -> None:
    assert "clip_range = 0.0001" in explain("algorithm.policy_loss", catalog)
    assert "it has no options" in explain("sde.all", catalog)


def test_no_path_lists_the_sections(catalog: Catalog) -> None:
    assert len(explain("", catalog).splitlines()) == len(SECTIONS)


def test_every_key_of_the_seeds_is_explained(catalog: Catalog) -> None:
    for row in flag_rows():
        for path in filter(None, [row.key if "." in row.key else "", row.was]):
            text = explain(path, catalog)
            assert text.startswith(path)
            if not row.available and not row.value:
                assert "not available in drl 0.1" in text


def test_every_option_and_component_is_explained(catalog: Catalog) -> None:
    for name, model in SECTIONS.items():
        for key in model.model_fields:
            assert "type     " in explain(f"{name}.{key}", catalog)
    for kind in KINDS:
        for component in catalog.names(kind.name) if kind.name != FUNCTION else ():
            assert explain(f"{kind.section}.{component}", catalog)
    for slot in SLOTS:
        section = explain(slot.option.partition(".")[0], catalog)
        for name in catalog.names(FUNCTION, slot.option):
            assert f"  {slot.option} takes {name}  " in section


def test_a_section_of_a_later_release_lists_its_options(catalog: Catalog) -> None:
    text = explain("fault_tolerance", catalog)
    assert text.startswith("[fault_tolerance]")
    assert "fault_tolerance.interval: known option, not available in drl 0.1" in text


@pytest.mark.parametrize(
    ("path", "near"),
    [("trin.seed", "train.seed"), ("rollout.batch_sise", "rollout.batch_size"), ("sed", "sde")],
)
def test_an_unknown_path_names_the_nearest(catalog: Catalog, path: str, near: str) -> None:
    with pytest.raises(BadInput, match=f"did you mean '{near}'"):
        explain(path, catalog)


def test_an_unknown_option_of_a_component_is_refused(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="did you mean 'clip_range'"):
        explain("algorithm.policy_loss.clip_rang", catalog)


def test_every_option_has_help_and_its_default_passes_its_limits() -> None:
    for name, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            assert field.description, f"{name}.{key}"
            assert field.description.endswith("."), f"{name}.{key}"
        required = {"model": {"checkpoint": "a/b"}, "rollout": {"batch_size": 1}}
        assert model.model_validate(required.get(name, {}))


def test_the_schema_knows_sections_and_installed_plugins(catalog: Catalog) -> None:
    schema = json.loads(json.dumps(recipe_schema(catalog)))
    assert list(schema["properties"]) == ["include", *SECTIONS]
    algorithm = schema["properties"]["algorithm"]["properties"]
    names = algorithm["loss"]["anyOf"][0]["enum"]
    assert names == catalog.names("loss")
    assert {"nft", "policy_loss", "sft_loss"} <= set(names)
    assert algorithm["policy_loss"]["properties"]["clip_range"]["exclusiveMinimum"] == 0
    assert algorithm["ref_mode"]["enum"] == ["none", "lora_base", "ema"]
    assert schema["properties"]["sync"]["properties"]["updater"]["anyOf"][0]["enum"][0] == "auto"
    assert schema["properties"]["run"]["additionalProperties"] is False
    assert not [path for path in _references(schema) if path not in schema["$defs"]]


def test_the_schema_requires_nothing_and_has_no_null(catalog: Catalog) -> None:
    text = json.dumps(recipe_schema(catalog)["properties"])
    assert '"required"' not in text
    assert '"null"' not in text


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"].removeprefix("#/$defs/")] if "$ref" in value else []
        return own + [path for inner in value.values() for path in _references(inner)]
    if isinstance(value, list):
        return [path for inner in value for path in _references(inner)]
    return []


def test_the_table_has_a_row_for_every_option() -> None:
    table = option_table()
    for name, model in SECTIONS.items():
        assert f"**`[{name}]`**" in table
        for key in model.model_fields:
            assert f"| `{key}` |" in table


def test_the_recipe_guide_has_the_current_table() -> None:
    text = PAGE.read_text("utf-8")
    written = text.partition(START)[2].partition(END)[0].strip()
    assert written == option_table(), "run: python -m drl.config.table"


def schema_of(catalog: Catalog) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(recipe_schema(catalog)))
    return found


def test_an_editor_is_told_that_other_keys_are_mistakes(catalog: Catalog) -> None:
    schema = schema_of(catalog)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["include"]["additionalProperties"] is False
    for name in SECTIONS:
        open_table = schema["properties"][name].get("additionalProperties")
        assert open_table == ({"type": "object"} if name == "reward" else False), name


def test_an_editor_offers_the_installed_components_by_name(catalog: Catalog) -> None:
    properties = schema_of(catalog)["properties"]
    for kind in KINDS:
        if kind.name == FUNCTION:
            continue
        section, _, key = kind.option.partition(".")
        rule = properties[section]["properties"][key]
        if kind.name == "logger":  # a list of names
            assert "anyOf" not in rule
            continue
        names = catalog.names(kind.name)
        assert rule["anyOf"] == [
            {"enum": ["auto", *names] if kind.name == "updater" else names},
            BY_PATH,
        ]
        assert "pattern" not in rule


def test_an_editor_offers_the_functions_of_each_slot(catalog: Catalog) -> None:
    properties = schema_of(catalog)["properties"]
    for slot in SLOTS:
        section, _, key = slot.option.partition(".")
        names, path = properties[section]["properties"][key]["anyOf"]
        assert names == {"enum": catalog.names(FUNCTION, slot.option)}
        assert re.search(path["pattern"], "my.module:keep")
        assert not re.search(path["pattern"], "my.module.keep")


def test_a_component_without_options_takes_no_key(catalog: Catalog) -> None:
    tables = schema_of(catalog)["properties"]["sde"]["properties"]
    assert tables["ode"] == {"type": "object", "maxProperties": 0}
    assert "range" in tables["sde_window"]["properties"]


def test_a_plugin_whose_options_do_not_load_leaves_the_schema_whole(
    make_plugin: Callable[..., EntryPoint],
) -> None:
    body = MINIMAL_PLUGIN.replace("'How bright.'", "'How bright.', config='tone_absent:Options'")
    found = schema_of(Catalog.load(installed=[make_plugin("acme-tone", body)]))
    reward = found["properties"]["reward"]["properties"]
    assert reward["type"]["anyOf"][0] == {"enum": ["tone"]}
    assert "tone" not in reward


def test_a_section_is_headed_by_its_own_sentence(catalog: Catalog) -> None:
    for name, model in SECTIONS.items():
        first = (model.__doc__ or "").strip().splitlines()[0]
        assert explain(name, catalog).splitlines()[0] == f"[{name}]  {first}"
        assert f"[{name}]  {first}" in explain("", catalog).splitlines()


def test_what_an_option_does_not_have_is_not_listed(catalog: Catalog) -> None:
    words = [line.split()[0] for line in explain("optimizer.lr", catalog).splitlines()[2:]]
    assert words == ["type", "default", "limits", "owner"]
    words = [line.split()[0] for line in explain("trust.parity", catalog).splitlines()[2:]]
    assert words == ["type", "default", "owner"]


def test_a_key_of_a_component_is_not_explained_as_one_of_core(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match=r"reward\.type\.quality: there is no such option"):
        explain("reward.type.quality", catalog)


def test_the_default_of_a_table_is_its_own_defaults(catalog: Catalog) -> None:
    (line,) = [one for one in explain("debug.ci", catalog).splitlines() if "default" in one]
    assert line.split(maxsplit=1)[1] == (
        "{enabled = false, metric_key = unset, metric_threshold = unset}"
    )


def test_every_section_has_defaults_that_a_person_can_read(catalog: Catalog) -> None:
    for section in ("model", "lora", "cluster", "train", "sampling", "rollout", "debug", "eval"):
        assert "Undefined" not in explain(section, catalog), section
