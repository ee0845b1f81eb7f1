"""``drl config``, ``drl plan`` and ``drl run`` up to the point where a run would begin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")

Drl = Callable[..., tuple[int, str, str]]


def test_a_recipe_that_is_valid_says_so(drl: Drl) -> None:
    assert drl("config", "check", QUICKSTART) == (0, f"{QUICKSTART} is valid\n", "")


def test_set_is_checked_like_the_file(drl: Drl) -> None:
    code, _, err = drl("config", "check", QUICKSTART, "--set", "rollout.batch_siez=4")
    assert code == 2
    assert "rollout.batch_siez" in err
    assert "batch_size" in err


def test_show_gives_every_option_and_its_origin(drl: Drl) -> None:
    code, out, _ = drl(
        "config", "show", QUICKSTART, "--origin", "--set", "train.seed=7", "--set", "run.name=x"
    )
    lines = out.splitlines()
    assert code == 0
    assert "train.seed = 7\t--set" in lines
    assert 'run.name = "x"\t--set' in lines
    assert any(line.endswith("\tdefault") for line in lines)


def test_show_as_toml_is_a_recipe(drl: Drl, tmp_path: Path) -> None:
    complete = tmp_path / "complete.toml"
    complete.write_text(drl("config", "show", QUICKSTART, "--toml")[1])
    assert drl("config", "check", str(complete))[0] == 0
    assert drl("config", "show", str(complete))[1] == drl("config", "show", QUICKSTART)[1]


def test_explain_an_option_and_a_section(drl: Drl) -> None:
    code, out, _ = drl("config", "explain", "algorithm.policy_loss.clip_range")
    assert code == 0
    assert "drl-loss-flow-grpo" in out
    assert "ocr" in drl("config", "explain", "reward")[1]
    assert drl("config", "explain", "rollout.batch_siez")[0] == 2


def test_plan_prints_the_arithmetic(drl: Drl) -> None:
    code, out, _ = drl(
        "plan",
        QUICKSTART,
        "--set",
        "rollout.batch_size=4",
        "--set",
        "rollout.n_samples_per_prompt=8",
    )
    assert code == 0
    assert "4 prompts x 8 samples = 32 samples" in out


def test_a_dry_run_writes_nothing(
    drl: Drl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = drl("run", QUICKSTART, "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert code == 0
    assert "samples" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "site"] or list(tmp_path.iterdir()) == []


def test_a_run_of_a_bad_recipe_names_all_problems(drl: Drl, tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text(TEN_MISTAKES)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a sign"}\n')
    for command in (["config", "check"], ["run"], ["plan"]):
        code, out, err = drl(*command, str(recipe))
        assert (code, out) == (2, "")
        assert "bad.toml has 10 problems" in err
        for path in MISTAKEN:
            assert path in err, path


TEN_MISTAKES = """
[run]
name = ""
[model]
family = "sd33"
checkpoint = "acme/sd3"
[lora]
rank = 0
[rollout]
engine = "locall"
batch_size = "many"
n_sample_per_prompt = 4
[data]
source = "jsonl"
prompt_data = "prompts.jsonl"
[train]
num_rollout = 2
[sampling]
num_steps = 4
[sde]
type = "cps"
noise_level = -1
num_steps = 2
step_strategy = "sde_window"
[reward]
type = "oct"
[algorithm]
loss = "policy_loss"
[algorithm.policy_loss]
clip_range = -0.1
[surprise]
x = 1
"""

MISTAKEN = [
    "run.name",
    "model.family",
    "lora.rank",
    "rollout.engine",
    "rollout.batch_size",
    "rollout.n_sample_per_prompt",
    "sde.noise_level",
    "reward.type",
    "algorithm.policy_loss.clip_range",
    "surprise",
]


@pytest.mark.parametrize(
    "option",
    [
        "reward.type",
        "algorithm.loss",
        "sde.step_strategy",
        "data.source",
        "model.family",
        "rollout.engine",
        "rollout.custom_generate",
    ],
)
@pytest.mark.parametrize("command", [("config", "check"), ("plan",), ("run", "--dry-run")])
def test_no_code_that_a_recipe_names_is_run(
    drl: Drl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    command: tuple[str, ...],
) -> None:
    mark = tmp_path / "it-ran"
    (tmp_path / "named_by_a_recipe.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = drl(*command, QUICKSTART, "--set", f"{option}=named_by_a_recipe:thing")
    assert code == 2
    assert option in err
    assert not mark.exists()
