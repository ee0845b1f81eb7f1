"""Explanations, the JSON schema and the option table, all from the same models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config.explain import explain
from drl.config.flags import flag_rows
from drl.config.schema import recipe_schema
from drl.config.sections import SECTIONS
from drl.config.table import option_table
from drl.errors import BadInput
from drl.kinds import KINDS

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
        for component in catalog.names(kind.name):
            assert explain(f"{kind.section}.{component}", catalog)


def test_a_section_of_a_later_release_lists_its_options(catalog: Catalog) -> None:
    text = explain("ema", catalog)
    assert text.startswith("[ema]")
    assert "ema.decay_init: known option, not available in drl 0.1" in text


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
    assert algorithm["loss"]["enum"] == ["policy_loss", "sft_loss"]
    assert algorithm["policy_loss"]["properties"]["clip_range"]["exclusiveMinimum"] == 0
    assert algorithm["ref_mode"]["enum"] == ["none", "lora_base"]
    assert schema["properties"]["sync"]["properties"]["updater"]["enum"][0] == "auto"
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
