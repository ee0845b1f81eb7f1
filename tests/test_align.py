"""``drl align``: exit codes, files, and recipes that have nothing to compare."""

from __future__ import annotations

import csv
import json
import os
import signal
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e import RECIPE, set_words, write_recipe

Drl = Callable[..., tuple[int, str, str]]

SMALL = ("--samples", "4")


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    return write_recipe(tmp_path, checkpoint)


def test_equal_bits_are_said_so_and_everything_is_written(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    out = tmp_path / "out"
    words = ("--adapter", "recipe", "--rollouts", "2", "--out", str(out))
    code, text, err = drl("align", str(recipe), *SMALL, *words)
    assert code == 0, err
    assert "exactly 0.0 at every step: rollout and trainer agree to the bit on 16 pairs" in text
    assert "cause" not in text
    assert max(map(len, text.splitlines())) <= 100 + len(str(tmp_path))
    found = json.loads((out / "align.json").read_text())
    assert found["exact"]
    assert found["pairs"] == 16
    assert found["facts"]["lora"] == "gaussian"
    assert [row["rows"] for row in found["rows"]] == [1, 2, 4, 8, 16]
    rows = [*csv.DictReader((out / "align.csv").open())]
    assert [int(row["step"]) for row in rows] == [step["step"] for step in found["steps"]]
    assert all(float(row["log_prob_max"]) == 0.0 == float(row["output_max"]) for row in rows)
    picture = ET.parse(out / "align.svg").getroot()
    assert "log-prob" in "".join(picture.itertext())
    assert str(out / "align.svg") in text


def test_a_difference_above_the_limit_is_exit_code_1_with_its_cause(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    out = tmp_path / "out"
    sets = set_words(("trust.max_log_prob_diff=1e-12", "rollout.local.weights=fp32"))
    code, text, err = drl("align", str(recipe), *SMALL, "--out", str(out), *sets)
    assert code == 1, err
    assert "ABOVE trust.max_log_prob_diff = 1.0e-12" in text
    assert "cause: adapters merged into the weights" in text
    found = json.loads((out / "align.json").read_text())
    assert found["causes"] == ["adapters merged into the weights"]
    assert not found["within"]
    assert found["facts"]["lora"] == "random"


def test_the_same_difference_within_the_limit_is_exit_code_0_and_needs_no_causes(
    recipe: Path, drl: Drl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    code, text, _ = drl("align", str(recipe), *SMALL, "--no-causes")
    assert code == 0
    assert "within trust.max_log_prob_diff" in text
    assert "cause" not in text
    (folder,) = Path("runs").glob("tiny-align-*")
    assert {file.name for file in folder.iterdir()} >= {"recipe.toml", "align.json", "align.svg"}


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ("algorithm.loss=nft", "sde.type=ode", "sde.step_strategy=ode_and_return_last"),
            "algorithm.loss = 'nft' trains on no recorded steps of an engine",
        ),
        (("train.num_rollout=0",), "train.num_rollout = 0: this recipe trains nothing"),
        (("train.attention_backend=flashy",), "no attention backend 'flashy'; did you mean"),
        (("train.parameter_dtypes=[['nothing*', 'bf16']]",), "'nothing*' matches no parameter"),
        (("debug.load_rollout_data=dumps/{rollout_id}.safetensors",), "load_rollout_data"),
    ],
)
def test_a_recipe_with_nothing_to_compare_is_exit_code_2_and_writes_nothing(
    recipe: Path, tmp_path: Path, drl: Drl, sets: tuple[str, ...], said: str
) -> None:
    out = tmp_path / "out"
    code, _, err = drl("align", str(recipe), "--out", str(out), *set_words(sets))
    assert code == 2, err
    assert said in err
    assert not out.exists()


def test_a_folder_that_is_taken_is_refused(recipe: Path, tmp_path: Path, drl: Drl) -> None:
    code, _, err = drl("align", str(recipe), "--out", str(tmp_path))
    assert code == 2
    assert "is not empty; name a new folder with --out" in err
    code, _, err = drl("align", str(recipe), "--out", "")
    assert code == 2
    assert "'--out': it is empty; name a folder" in err


def killed_probe(folder: Path, recipe: str) -> dict[str, bytes]:
    """Write what a probe leaves that is killed after its push of weights."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe)
    (folder / "lock.json").write_text('{"pid": 1, "host": "here"}')
    (folder / ".plugins.json.0123456789ab.partial").write_text("{")
    for name in ("lock", "plugins.json", "sync.jsonl"):
        (folder / name).write_text("")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_folder_of_a_killed_probe_is_used_again(recipe: Path, tmp_path: Path, drl: Drl) -> None:
    out = tmp_path / "out"
    killed_probe(out, "[debug]\nskip_optimizer_step = true\n")
    (out / "sync.jsonl").write_text('{"version": 7}\n')
    words = ("--adapter", "recipe", "--out", str(out))
    code, _, err = drl("align", str(recipe), *SMALL, *words)
    assert code == 0, err
    assert json.loads((out / "align.json").read_text())["exact"]
    assert json.loads((out / "sync.jsonl").read_text())["version"] == 0
    assert "skip_optimizer_step = true" in (out / "recipe.toml").read_text()
    assert not list(out.glob(".*"))
    code, _, err = drl("align", str(recipe), *SMALL, *words)
    assert code == 2
    assert "holds a run already; name a new folder with --out" in err


def test_what_another_run_left_is_not_written_over(recipe: Path, tmp_path: Path, drl: Drl) -> None:
    """A training that was killed as early has the same files, and may be resumed."""
    out = tmp_path / "out"
    before = killed_probe(out, "[debug]\nskip_optimizer_step = false\n")
    code, _, err = drl("align", str(recipe), *SMALL, "--out", str(out))
    assert code == 2
    assert "holds a run already" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_override_that_would_switch_the_probe_off_is_refused(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    override = tmp_path / "over.toml"
    override.write_text("[debug]\nengine_debug = false\n")
    code, _, err = drl("align", str(recipe), "--override", str(override))
    assert code == 2
    assert "leave debug.engine_debug" in err


def test_a_recipe_for_several_ranks_is_probed_on_one(
    checkpoint: Path, tmp_path: Path, drl: Drl
) -> None:
    text = RECIPE + "\n[cluster]\nactor_num_gpus_per_node = 2\n"
    recipe = write_recipe(tmp_path, checkpoint, text)
    code, said, err = drl(
        "align", str(recipe), *SMALL, "--adapter", "recipe", "--out", str(tmp_path / "out")
    )
    assert code == 0, err
    assert "exactly 0.0" in said


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_probed_as_they_are(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    run_dir = tmp_path / "run"
    assert drl("run", str(recipe), "--run-dir", str(run_dir))[0] == 0
    sets = set_words((f"checkpoint.load={run_dir / 'checkpoints'}", "rollout.local.weights=fp32"))
    out = tmp_path / "out"
    code, _, err = drl("align", str(recipe), *SMALL, *sets, "--out", str(out))
    assert code == 0, err
    found = json.loads((out / "align.json").read_text())
    assert found["facts"]["lora"] == "gaussian"
    assert 0 < found["log_prob_max_abs_diff"] < 1e-6, "trained adapters are merged in the engine"


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_an_engine_that_applies_adapters_is_exactly_equal_with_adapters_that_do_something(
    recipe: Path, tmp_path: Path, drl: Drl, dtype: str
) -> None:
    sets = ("rollout.local.adapters=applied", f"train.forward_dtype={dtype}")
    words = ("--out", str(tmp_path / "out"), *set_words((*sets, "sampling.guidance_scale=3.0")))
    code, text, err = drl("align", str(recipe), *SMALL, *words)
    assert code == 0, err
    assert "adapters start random" in text
    assert "exactly 0.0 at every step" in text


def test_a_recipe_that_evaluates_now_and_then_is_probed_with_its_warnings_said_once(
    recipe: Path, tmp_path: Path, drl: Drl
) -> None:
    """What the probe itself leaves out is no reason to refuse a recipe, nor to warn of it."""
    sets = set_words(("eval.interval=1", "cluster.offload=true", "model.checkpointed_share=0.5"))
    words = ("--adapter", "recipe", "--out", str(tmp_path / "out"))
    code, said, err = drl("align", str(recipe), *SMALL, *words, *sets)
    assert code == 0, err
    assert "exactly 0.0" in said
    first, second = sorted(err.splitlines())
    assert first.startswith("warning: cluster.offload  is of no use")
    assert second.startswith("warning: model.checkpointed_share  is not used")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_probe_that_is_stopped_leaves_no_folder(
    recipe: Path, tmp_path: Path, drl: Drl, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made: list[Path] = []

    def stopped(directory: Path) -> None:
        made.extend(directory.iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr("drl.align.probe.measure", lambda run, wanted: stopped(run.directory.path))
    code, _, err = drl("align", str(recipe), "--out", str(tmp_path / "out"))
    assert (code, err.strip()) == (130, "interrupted")
    assert {path.name for path in made} >= {"recipe.toml", "plugins.json"}
    assert not (tmp_path / "out").exists()


def test_a_probe_that_is_stopped_while_it_writes_leaves_no_folder(
    recipe: Path, tmp_path: Path, drl: Drl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path, text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("drl.align.show.write_text_atomic", stopped)
    code, _, err = drl("align", str(recipe), *SMALL, "--out", str(tmp_path / "out"))
    assert (code, err.strip().splitlines()[-1]) == (130, "interrupted")
    assert not (tmp_path / "out").exists()
