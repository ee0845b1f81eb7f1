"""From files and settings to a recipe: layers, origins, includes, paths, and back to TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drl.catalog import Catalog
from drl.config import Recipe, load_recipe
from drl.config.machine import Machine
from drl.config.sections import SECTIONS
from drl.errors import RecipeError

Load = Callable[..., Recipe]
Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]


def test_a_right_recipe_has_values_defaults_and_no_warnings(load: Load) -> None:
    recipe = load()
    assert recipe.rollout.batch_size == 4
    assert recipe.lora.rank == 32
    assert recipe.lora.alpha == 64.0
    assert recipe.algorithm.loss == "policy_loss"
    assert recipe.logging.loggers == ("console", "jsonl")
    assert recipe.warnings == ()
    assert recipe.source == "recipe.toml"


def test_recipe_and_sections_are_frozen(load: Load) -> None:
    recipe = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.source = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        recipe.train.seed = 1  # type: ignore[misc]


def test_each_layer_wins_over_the_one_below(load: Load, folder: Path, base: str) -> None:
    (folder / "common.toml").write_text("[train]\nseed = 1\n[optimizer]\nlr = 1e-3\nbeta1 = 0.5\n")
    (folder / "more.toml").write_text("[train]\nseed = 2\n[optimizer]\nbeta2 = 0.5\n")
    override = folder / "late.yaml"
    override.write_text("optimizer:\n  eps: 1e-4\n")
    included = 'include.files = ["common.toml", "more.toml"]\n'
    text = included + base + "[optimizer]\nlr = 1e-2\n"
    recipe = load(
        text=text, sets=["optimizer.eps=1e-2", "optimizer.clip_grad=2"], override=override
    )
    assert recipe.train.seed == 2
    assert recipe.optimizer.lr == 1e-2
    assert recipe.optimizer.eps == 1e-4
    origins = recipe.origins
    assert origins["train.seed"] == "more.toml"
    assert origins["optimizer.lr"] == "recipe.toml"
    assert origins["optimizer.beta1"] == "common.toml"
    assert origins["optimizer.clip_grad"] == "--set"
    assert origins["optimizer.eps"] == "late.yaml"
    assert origins["optimizer.weight_decay"] == "default"
    assert origins["run.name"] == "auto"


def test_a_later_setting_wins_over_an_earlier_one(load: Load) -> None:
    assert load(sets=["train.seed=1", "train.seed=2"]).train.seed == 2


def test_an_override_that_takes_a_value_is_logged(warnings: Warnings, folder: Path) -> None:
    override = folder / "late.toml"
    override.write_text("[rollout]\nbatch_size = 8\nmax_draws = 3\n")
    assert warnings(override=override) == {
        "rollout.batch_size": "the override file late.toml wins   (late.toml, line 2)"
    }


def test_values_are_checked_after_all_layers_are_merged(
    load: Load, problems: Problems, folder: Path
) -> None:
    override = folder / "late.toml"
    override.write_text("[lora]\nrank = 8\n")
    assert load({"lora.rank": 0}, override=override).lora.rank == 8
    override.write_text("[lora]\nrank = 0\n")
    assert list(problems(override=override)) == ["lora.rank"]


def test_null_in_an_override_takes_back_what_lies_below(load: Load, folder: Path) -> None:
    override = folder / "late.yml"
    override.write_text("lora:\n  rank: null\n")
    recipe = load(override=override)
    assert recipe.lora.rank == 64
    assert recipe.origins["lora.rank"] == "default"


def test_yaml_keeps_off_as_text_and_reads_exponents(load: Load, folder: Path) -> None:
    override = folder / "late.yaml"
    override.write_text("sync:\n  verify: off\noptimizer:\n  lr: 1e-4\ntrust:\n  parity: false\n")
    recipe = load(override=override)
    assert recipe.sync.verify == "off"
    assert recipe.optimizer.lr == 1e-4
    assert recipe.trust.parity is False


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("late.yaml", "- 1\n", "must hold sections"),
        ("late.yaml", "a: [", "is not valid YAML"),
        ("late.yaml", "1: 2\n", "cannot be the name of an option"),
        ("late.yaml", "a: &x [*x]\n", "is not valid YAML"),
        ("late.yaml", "a: 2020-13-45\n", "is not valid YAML"),
        ("late.toml", "a = ", "is not valid TOML"),
        ("late.ini", "", "ends in .toml, .yaml, .yml or .json"),
    ],
)
def test_an_override_that_cannot_be_read_says_why(
    problems: Problems, folder: Path, name: str, text: str, said: str
) -> None:
    override = folder / name
    override.write_text(text)
    (message,) = problems(override=override).values()
    assert said in message


def test_an_empty_override_changes_nothing(load: Load, folder: Path) -> None:
    override = folder / "late.yaml"
    override.write_text("")
    assert load(override=override).resolved() == load().resolved()


def test_includes_are_read_below_the_file_and_relative_to_it(
    load: Load, folder: Path, base: str
) -> None:
    (folder / "shared").mkdir()
    (folder / "shared" / "a.toml").write_text('include.files = ["b.toml"]\n[train]\nseed = 5\n')
    (folder / "shared" / "b.toml").write_text("[train]\nseed = 6\nmicro_batch_size = 2\n")
    recipe = load(text=f'include.files = ["shared/a.toml"]\n{base}')
    assert (recipe.train.seed, recipe.train.micro_batch_size) == (5, 2)


def test_a_file_named_in_an_include_is_relative_to_the_include(
    load: Load, folder: Path, base: str
) -> None:
    (folder / "shared").mkdir()
    (folder / "shared" / "mine.jsonl").write_text("{}\n")
    (folder / "shared" / "a.toml").write_text('[data]\nprompt_data = "mine.jsonl"\n')
    text = base.replace('[data]\nprompt_data = "prompts.jsonl"\n', "")
    recipe = load(text=f'include.files = ["shared/a.toml"]\n{text}')
    assert recipe.data.prompt_data == folder / "shared" / "mine.jsonl"


def test_a_cycle_of_includes_is_refused(problems: Problems, folder: Path, base: str) -> None:
    (folder / "a.toml").write_text('include.files = ["recipe.toml"]\n')
    found = problems(text=f'include.files = ["a.toml"]\n{base}')
    assert found == {"include.files": "includes form a cycle: recipe.toml -> a.toml -> recipe.toml"}


@pytest.mark.parametrize(
    "table", ["include = 1", "include.files = 1", "include.files = [1]", "include.file = []"]
)
def test_an_include_that_is_no_list_of_files_is_refused(
    problems: Problems, base: str, table: str
) -> None:
    assert "with a list of file names" in problems(text=f"{table}\n{base}")["include"]


def test_a_missing_include_is_named(problems: Problems, base: str) -> None:
    (message,) = problems(text=f'include.files = ["gone.toml"]\n{base}').values()
    assert "gone.toml: No such file" in message


def test_paths_of_a_recipe_are_relative_to_it(load: Load, folder: Path) -> None:
    datasets = [{"name": "heldout", "path": "heldout.jsonl"}]
    recipe = load({"eval.datasets": datasets, "eval.interval": 2})
    assert recipe.data.prompt_data == folder / "prompts.jsonl"
    assert recipe.eval.datasets[0].path == folder / "heldout.jsonl"


def test_paths_of_a_setting_are_relative_to_the_working_directory(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "here").mkdir()
    (folder / "here" / "mine.jsonl").write_text("{}\n")
    monkeypatch.chdir(folder / "here")
    assert load(sets=["data.prompt_data=mine.jsonl"]).data.prompt_data == Path.cwd() / "mine.jsonl"


def test_output_folders_stay_as_written(load: Load) -> None:
    recipe = load({"run.directory": "out", "checkpoint.save": "kept"})
    assert (recipe.run.directory, recipe.checkpoint.save) == ("out", "kept")


def test_resolved_toml_is_a_recipe_with_the_same_values(load: Load, folder: Path) -> None:
    changes = {
        "reward.type": None,
        "reward.terms": [{"name": "jpeg", "weight": 0.5}, {"name": "small", "plugin": "jpeg"}],
        "reward.small.quality": 20,
        "eval.datasets": [{"name": "heldout", "path": "heldout.jsonl"}],
        "eval.interval": 2,
        "sampling.negative_prompt": 'blurry "text"\nand\\more',
        "sync.buffer_size": "2GiB",
        "algorithm.sft_loss.sigma": "grid",
    }
    recipe = load(changes)
    (folder / "elsewhere").mkdir()
    again = load_recipe(
        _written(folder / "elsewhere" / "again.toml", recipe.to_toml()),
        catalog=recipe.catalog,
        machine=Machine(cuda=True),
    )
    assert again.resolved() == recipe.resolved()
    assert again.to_toml() == recipe.to_toml()
    assert [w.path for w in again.warnings] == [w.path for w in recipe.warnings]


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.components", ["transformer"]),
        ("lora.alpha", 64.0),
        ("lora.init_weights", "gaussian"),
        ("train.seed", 1234),
        ("train.micro_batch_size", 1),
        ("optimizer.lr", 1e-6),
        ("optimizer.beta2", 0.999),
        ("optimizer.eps", 1e-8),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.clip_grad", 1.0),
        ("optimizer.lr_decay_style", "constant"),
        ("rollout.microgroup_size", 1),
        ("sampling.num_steps", 10),
        ("sampling.guidance_scale", 4.0),
        ("sampling.height", 512),
        ("sampling.num_frames", 1),
        ("sde.type", "sde"),
        ("sde.noise_level", 0.7),
        ("data.input_key", "input"),
        ("eval.n_samples_per_prompt", 1),
        ("eval.before_train", True),
        ("algorithm.loss", "policy_loss"),
        ("algorithm.adv_clip_max", 5.0),
        ("algorithm.kl_beta", 0.0),
        ("sync.buffer_size", 512 * 2**20),
    ],
)
def test_defaults_are_those_of_the_seeds(load: Load, path: str, value: Any) -> None:
    recipe = load()
    section, key = path.split(".")
    assert recipe.resolved()[section][key] == value
    assert recipe.origins[path] == "default"


def test_every_value_has_an_origin(load: Load) -> None:
    recipe = load()
    for section, values in recipe.resolved().items():
        for key, value in values.items():
            if not isinstance(value, dict):
                assert f"{section}.{key}" in recipe.origins


def test_resolved_has_every_section(load: Load) -> None:
    assert list(load().resolved()) == list(SECTIONS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"a = [1,", "is not valid TOML"),
        (b"a = " + b"[" * 3000, "is not valid TOML"),
        (b"a = " + b"9" * 5000, "is not valid TOML"),
        (b"a." + b"b." * 30 + b"c = 1", "nested deeper than"),
        (b'"a.b" = 1', "cannot be the name of an option"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(
    folder: Path, catalog: Catalog, content: bytes, said: str
) -> None:
    file = folder / "recipe.toml"
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=said):
        load_recipe(file, catalog=catalog)


def test_a_syntax_error_has_its_line(folder: Path, catalog: Catalog) -> None:
    file = _written(folder / "recipe.toml", "[model]\ncheckpoint = \n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, catalog=catalog)
    assert caught.value.problems[0].line == 2
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["gone.toml", ".", "a\0b"])
def test_a_recipe_that_is_not_there_is_refused(folder: Path, catalog: Catalog, name: str) -> None:
    with pytest.raises(RecipeError, match="cannot read"):
        load_recipe(folder / name, catalog=catalog)


def test_a_byte_order_mark_is_no_mistake(folder: Path, catalog: Catalog, base: str) -> None:
    file = folder / "recipe.toml"
    file.write_bytes(b"\xef\xbb\xbf" + base.encode())
    assert load_recipe(file, catalog=catalog).rollout.batch_size == 4


def test_an_empty_recipe_lists_what_is_required(problems: Problems) -> None:
    found = problems(text="")
    assert set(found) == {
        "model.checkpoint",
        "rollout.batch_size",
        "train.num_rollout",
        "data.prompt_data",
        "reward.type",
        "sde.num_steps",
    }


def test_options_of_a_component_without_a_table_are_its_defaults(load: Load) -> None:
    recipe = load()
    options: Any = recipe.options("loss", "policy_loss")
    assert options.clip_range == 1e-4
    assert recipe.options("sde_backend", "ode") is None
    window: Any = load({"sde.sde_window.range": [1, 4]}).options("step_strategy", "sde_window")
    assert window.range == (1, 4)
