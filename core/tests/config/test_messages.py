"""What a person reads about a wrong value: path, what is allowed, what was given, the nearest name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.lines import line_numbers
from drl.config.messages import limit_text, mixed_up, shown
from drl.config.render import warning_lines
from drl.errors import Problem, RecipeError

Problems = Callable[..., dict[str, str]]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("algorithm.policy_loss.clip_range", -0.1, "must be above 0, got -0.1"),
        ("optimizer.beta1", 1, "must be below 1, got 1"),
        ("lora.rank", 9000, "must be at most 8192, got 9000"),
        ("rollout.max_draws", 2.5, "must be a whole number, got 2.5"),
        ("rollout.max_draws", "4", "must be a whole number without quotes, got '4'"),
        ("rollout.max_draws", True, "must be a whole number, got true"),
        ("rollout.max_draws", "many", "must be a whole number, got 'many'"),
        ("rollout.max_draws", [1], "must be a whole number, got [1]"),
        ("optimizer.lr", "fast", "must be a number, got 'fast'"),
        ("optimizer.lr", True, "must be a number, got true"),
        ("optimizer.lr", float("nan"), "must be a finite number, got nan"),
        ("optimizer.lr", float("inf"), "must be a finite number, got inf"),
        ("trust.parity", 1, "must be true or false, got 1"),
        ("trust.parity", "true", "must be true or false, got 'true'"),
        ("run.directory", 3, "must be text, got 3; write it in quotes"),
        ("run.directory", "", "must not be empty, got ''"),
        ("run.directory", ["a"], "must be text, got ['a']"),
        ("logging.loggers", 3, "must be a list, got 3"),
        ("logging.loggers", {"a": 1}, "must be a list, got a table"),
        ("model.components", [], "must not be empty, got []"),
        ("model.components", ["a", "a"], "must not contain 'a' twice, got ['a', 'a']"),
        ("model.components", "", "must not contain an empty name, got ''"),
        (
            "train.forward_dtype",
            "bf61",
            "must be one of fp32, bf16, fp16, got 'bf61'; did you mean 'bf16'?",
        ),
        ("optimizer.name", "adamm", "must be one of adam, sgd, got 'adamm'; did you mean 'adam'?"),
        ("optimizer.name", "lion", "must be one of adam, sgd, got 'lion'"),
        ("ema.rollout_policy", "emma", "must be one of live, ema, got 'emma'; did you mean 'ema'?"),
        ("ema.decay_max", 1.5, "must be at most 1, got 1.5"),
        ("ema.decay_init", -0.1, "must be at least 0, got -0.1"),
        ("ema.decay_ramp", -1, "must be at least 0, got -1"),
        ("ema.decay_flat_steps", 2.5, "must be a whole number, got 2.5"),
        ("cluster.launcher", "ray", "'ray' is a known value, not available in drl 0.1"),
        ("train.master_dtype", "fp8", "must be one of fp32, bf16, fp16, got 'fp8'"),
        ("sync.buffer_size", "2 GB!", "must be a whole number, got '2 GB!'"),
        ("sync.buffer_size", 0, "must be above 0, got 0"),
    ],
)
def test_a_wrong_value_is_answered(problems: Problems, path: str, value: Any, message: str) -> None:
    assert problems({path: value}) == {path: message}


@pytest.mark.parametrize(
    ("written", "count"),
    [("2GiB", 2**31), ("512MiB", 2**29), ("1.5 kib", 1536), ("3 MB", 3_000_000), (7, 7)],
)
def test_sizes_are_written_with_units(load: Callable[..., Any], written: Any, count: int) -> None:
    assert load({"sync.buffer_size": written}).sync.buffer_size == count


def test_lists_of_names_are_written_with_commas_too(load: Callable[..., Any]) -> None:
    assert load({"lora.target_modules": "to_q, to_k"}).lora.target_modules == ("to_q", "to_k")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rollout.n_sample_per_prompt", "unknown option; did you mean 'n_samples_per_prompt'?"),
        ("model.zzz", "unknown option"),
        ("run.seed", "unknown option; did you mean 'train.seed'?"),
        ("algorithm.policy_loss.clip_rang", "unknown option; did you mean 'clip_range'?"),
        ("sde.sde_windw.range", "unknown option; did you mean 'sde_window'?"),
    ],
)
def test_an_unknown_option_names_the_nearest(problems: Problems, path: str, message: str) -> None:
    found = problems({path: 4})
    assert list(found.values()) == [message]
    assert path.startswith(next(iter(found)))


def test_a_misspelt_required_option_is_reported_once(problems: Problems) -> None:
    found = problems({"rollout.batch_size": None, "rollout.batch_sise": 4})
    assert found == {"rollout.batch_sise": "unknown option; did you mean 'batch_size'?"}


def test_an_unknown_section_names_the_nearest(problems: Problems) -> None:
    assert problems({"optimiser.lr": 1}) == {
        "optimiser": "unknown section; did you mean 'optimizer'?"
    }


def test_an_option_outside_of_sections_names_its_section(problems: Problems, base: str) -> None:
    found = problems(text=f"micro_batch_size = 4\nfoo = 1\n{base}")
    assert found == {
        "micro_batch_size": "stands outside of any section; did you mean 'train.micro_batch_size'?",
        "foo": "stands outside of any section",
    }


def test_a_section_that_is_no_table_is_refused(problems: Problems, base: str) -> None:
    assert problems(text=f"trust = 4\n{base}") == {"trust": "must be a table of options, got 4"}


def test_an_empty_section_that_is_not_available_is_refused(problems: Problems, base: str) -> None:
    assert problems(text=f"{base}\n[fault_tolerance]\n") == {
        "fault_tolerance": "known section, not available in drl 0.1 (owner drl-core)"
    }


def test_wrong_entries_of_a_list_are_numbered(problems: Problems) -> None:
    rows = [{"name": "a"}, {"name": "b", "path": "heldout.jsonl", "pth": 1}, 3]
    assert problems({"eval.datasets": rows}) == {
        "eval.datasets[0].path": "is required: File of prompts, one row per prompt.",
        "eval.datasets[1].pth": "unknown option; did you mean 'path'?",
        "eval.datasets[2]": "must be a table, got 3",
    }


def test_a_problem_has_its_line_and_place(
    problems: Problems, folder: Any, base: str, catalog: Catalog
) -> None:
    text = base.replace("rank = 32", "rank = 0")
    file = folder / "recipe.toml"
    file.write_text(text)
    override = folder / "late.toml"
    override.write_text("[train]\nseed = -1\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, sets=["optimizer.lr=-1"], override=override, catalog=catalog)
    lines = str(caught.value).splitlines()
    assert lines == [
        "recipe.toml has 3 problems",
        f"  lora.rank  must be above 0, got 0   (line {text.splitlines().index('rank = 0') + 1})",
        "  train.seed  must be at least 0, got -1   (late.toml, line 2)",
        "  optimizer.lr  must be at least 0, got -1   (--set)",
    ]


def test_long_values_are_shortened() -> None:
    assert len(shown("x" * 500)) == 60
    assert shown(None) == "nothing"
    assert shown([True, {"a": 1}]) == "[true, a table]"


def test_warnings_are_rendered_with_their_path() -> None:
    problems = [Problem("a.b", "is odd\nbecause", "warning", 3)]
    assert warning_lines(problems) == ["warning: a.b  is odd   (line 3)", "    because"]


LINES = '''\
top = 1
[a]
x = 1  # [not a table]
"y" = """
[b]
z = 2
"""
list = [
  "k = 1",
  2,
]
w.v = { p = 1 }
[a . b]
c = 'it''s = x'
[[rows]]
n = 1
[[rows]]
n = 2
'''


def test_lines_of_tables_keys_and_rows() -> None:
    assert line_numbers(LINES) == {
        "top": 1,
        "a": 2,
        "a.x": 3,
        "a.y": 4,
        "a.list": 8,
        "a.w.v": 12,
        "a.b": 13,
        "a.b.c": 14,
        "rows.0": 15,
        "rows.0.n": 16,
        "rows.1": 17,
        "rows.1.n": 18,
    }


@pytest.mark.parametrize(
    ("path", "value", "path_said", "message"),
    [
        ("sde.sde_window.range", ["0", 3], None, "must be a whole number without quotes"),
        ("sde.sde_window.range", [0, True], None, "must be a whole number, got true"),
        ("sde.sde_window.range", [0], None, None),
        ("run.name", "a b", None, "must match ^[A-Za-z0-9][A-Za-z0-9._-]*$, got 'a b'"),
        ("run.name", "x" * 101, None, "must have at most 100 characters, got 'xxx"),
        ("reward.terms", [{"weight": 1.0}], "reward.terms[0].name", "is required"),
        ("eval.datasets", [{"name": "a"}], "eval.datasets[0].path", "is required"),
        ("eval.datasets", ["words"], "eval.datasets[0]", "must be a table, got 'words'"),
        ("optimizer.eps", 0, None, "must be above 0, got 0"),
        ("optimizer.beta2", 1.0, None, "must be below 1, got 1.0"),
        ("train.seed", -1, None, "must be at least 0, got -1"),
    ],
)
def test_a_wrong_value_inside_a_list_or_name_is_answered_where_it_stands(
    problems: Problems, path: str, value: Any, path_said: str | None, message: str | None
) -> None:
    reward = {"reward.type": None} if path == "reward.terms" else {}
    found = problems({path: value, **reward})
    place = next(iter(found))
    assert place.startswith(path_said or path)
    assert message is None or message in found[place]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing"),
        (False, "false"),
        ({}, "a table"),
        ([], "[]"),
        ((1, 2), "[1, 2]"),
        ([True, None, {"a": 1}], "[true, nothing, a table]"),
        ([*range(9)], "[0, 1, 2, 3, 4, 5, 6, 7]"),
        ("x" * 58, "'" + "x" * 58 + "'"),
        ("x" * 59, "'" + "x" * 55 + " ..."),
        ("a\nb", r"'a\nb'"),
    ],
)
def test_values_are_shown_as_recipes_write_them_and_not_too_long(value: Any, text: str) -> None:
    assert shown(value) == text
    assert len(shown(value)) <= 60


@pytest.mark.parametrize(
    ("limit", "text"), [(1.0, "1"), (0.5, "0.5"), (3, "3"), (1e-05, "1e-05"), (-2.0, "-2")]
)
def test_limits_have_no_needless_fraction(limit: float, text: str) -> None:
    assert limit_text(limit) == text


@pytest.mark.parametrize(
    ("given", "taken", "said"),
    [
        ("4", 4, "must be a whole number without quotes, got '4'"),
        ("4.5 ", 4.5, "must be a number without quotes, got '4.5 '"),
        ("2GiB", 2**31, None),
        (4, 4, None),
        (True, 1.0, "must be a number, got true"),
        (0, False, "must be true or false, got 0"),
        (False, False, None),
        ([1, "2"], (1, 2), "must be a whole number without quotes, got '2'"),
        ([1, 2], (1, 2), None),
        (["x"], 3, None),
        ("x", ("x",), None),
        ([["1"]], ((1,),), "must be a whole number without quotes, got '1'"),
    ],
)
def test_a_scalar_of_another_type_that_was_taken_all_the_same_is_told(
    given: Any, taken: Any, said: str | None
) -> None:
    assert mixed_up(given, taken) == said
