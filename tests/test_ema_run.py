"""Runs with a moving average, in every dtype, resumed: the same shadow, the same figures, parity exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import kill_when
from e2e import (
    checkpoint_folder,
    last_saved,
    metric_rows,
    run_here,
    same,
    set_words,
    start_run,
    summary_of,
    trained_weights,
    trainer_state,
    without_trust,
    write_recipe,
)
from killing import Zygote
from torch import Tensor

import drl.loop
from drl.checkpoint.dcp import read_whole
from drl.checkpoint.folders import TRACKER
from drl.lora import read_peft
from drl.model.ema import EmaSettings, ema_decay
from drl.model.trainer import Trainer
from drl.stages.trust import prove_parity_once

QUIET = ("eval.before_train=false", "eval.after_train=false", "checkpoint.save_interval=1")
SLOW = ("ema.enabled=true", "ema.decay_init=0.9", "ema.decay_flat_steps=99", "optimizer.lr=0.01")
ROLLED_OUT = (*SLOW, "ema.rollout_policy=ema")
REFERENCE = (*SLOW, "algorithm.ref_mode=ema", "algorithm.kl_beta=0.1", "sde.type=sde")

NARROW = {
    "fp32": (),
    "bf16": ("train.forward_dtype=bf16",),
    "fp16": ("train.forward_dtype=fp16",),
    "bf16 masters": ("train.forward_dtype=bf16", "train.master_dtype=bf16"),
    "fp16 masters": (
        "train.forward_dtype=fp16",
        "train.master_dtype=fp16",
        "optimizer.eps=1e-4",
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny recipe."""
    return write_recipe(tmp_path_factory.mktemp("ema"), checkpoint)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Prove parity before every iteration, not only the first, and again after it was trained."""
    found: list[float] = []

    def prove(run: Any, shards: Any) -> None:
        run.parity = None
        prove_parity_once(run, shards)
        found.append(run.parity.worst)
        train = run.trainer.train

        def trained(shards: Any) -> Iterator[Any]:
            run.trainer.train = train
            before = {n: p.detach().clone() for n, p in run.trainer.named_parameters()}
            for report in train(shards):
                yield report
                # the engine still holds what made the samples, until the next push
                if run.trainer.ema.count == before_count:
                    found.append(run.trainer.replay(shards).worst)
            assert not same(before, dict(run.trainer.named_parameters()))

        before_count = run.trainer.ema.count
        run.trainer.train = trained

    monkeypatch.setattr(drl.loop, "prove_parity_once", prove)
    return found


def shadow(run_dir: Path, iteration: int) -> dict[str, Tensor]:
    return read_whole(checkpoint_folder(run_dir, iteration) / "ema")


def state(run_dir: Path, iteration: int) -> dict[str, Tensor]:
    """Weights, optimizer state and shadow of a checkpoint."""
    found = trainer_state(run_dir, iteration)
    if (checkpoint_folder(run_dir, iteration) / "ema").is_dir():
        found |= {f"ema {name}": tensor for name, tensor in shadow(run_dir, iteration).items()}
    return found


def sums(tensors: Mapping[str, Tensor]) -> list[float]:
    return sorted(tensor.double().sum().item() for tensor in tensors.values())


def meta(run_dir: Path, iteration: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(
        (checkpoint_folder(run_dir, iteration) / "meta.json").read_text()
    )
    return result


def test_the_shadow_is_the_average_of_the_weights_that_were_saved(
    recipe: Path, tmp_path: Path
) -> None:
    """One update per iteration, whatever number of optimizer steps, pushes and saves it has."""
    options = ("ema.decay_ramp=0.2", "train.num_steps_per_rollout=2", "train.num_rollout=3")
    run_here(recipe, tmp_path / "run", *QUIET, *ROLLED_OUT, "ema.decay_flat_steps=1", *options)
    settings = EmaSettings(decay_init=0.9, decay_ramp=0.2, decay_max=0.5, decay_flat_steps=1)
    rows = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert [row["train/ema_decay"] for row in rows] == [0.9, 0.2, 0.4]
    assert [row["train/ema_updates"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["train/step"] for row in rows] == [1.0, 3.0, 5.0]
    previous = shadow(tmp_path / "run", 1)
    for iteration in (2, 3):
        weights, now = (
            trained_weights(tmp_path / "run", iteration),
            shadow(tmp_path / "run", iteration),
        )
        decay = ema_decay(iteration, settings)
        assert weights.keys() == now.keys()
        for name, tensor in now.items():
            expected = decay * previous[name].double() + (1 - decay) * weights[name].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-8)
        gap = max((now[name] - weights[name]).abs().max().item() for name in now)
        assert rows[iteration - 1]["train/ema_distance"] == pytest.approx(gap, rel=1e-6)
        assert meta(tmp_path / "run", iteration)["ema"]["count"] == iteration
        previous = now


def test_rollouts_of_the_average_match_a_replay_with_the_average(
    recipe: Path, tmp_path: Path, proofs: list[float]
) -> None:
    """Exactly: before training, between optimizer steps when the weights have moved, after a push."""
    options = ("lora.enabled=false", "train.num_rollout=3", "train.num_steps_per_rollout=2")
    run_here(recipe, tmp_path / "run", *QUIET, *ROLLED_OUT, *options)
    assert proofs == [0.0] * 6
    rows = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert rows[0]["train/ratio_abs_minus_1_update_0"] == 0.0
    # the weights are ahead of their average, which made the samples
    assert all(row["train/ratio_abs_minus_1_update_0"] > 0 for row in rows[1:])


def test_a_replay_with_the_trained_weights_would_not_match(
    recipe: Path, tmp_path: Path, proofs: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: once the weights have moved, only a swap gives what the engine holds."""
    monkeypatch.setattr(Trainer, "rolled_out", lambda self: nullcontext())
    options = ("lora.enabled=false", "train.num_rollout=1", "train.num_steps_per_rollout=2")
    run_here(recipe, tmp_path / "run", *QUIET, *ROLLED_OUT, *options)
    before, after = proofs
    assert before == 0.0
    assert after > 1e-3


@pytest.mark.parametrize("policy", ["ema", "live"])
def test_adapters_match_within_the_rounding_of_the_engines_merge(
    recipe: Path, tmp_path: Path, proofs: list[float], policy: str
) -> None:
    options = ("ema.rollout_policy=ema",) if policy == "ema" else REFERENCE
    run_here(recipe, tmp_path / "run", *QUIET, *SLOW, *options, "train.num_rollout=3")
    assert len(proofs) == 3
    assert proofs[0] == 0.0
    assert max(proofs) < 2e-6


def test_the_reference_is_the_average_and_the_kl_term_sees_it(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "run", *QUIET, *REFERENCE, "train.num_rollout=3")
    first, *others = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert first["train/kl_loss"] == 0.0
    assert all(row["train/kl_loss"] > 0 for row in others)


def test_full_weights_need_no_adapter_for_a_reference(recipe: Path, tmp_path: Path) -> None:
    options = ("lora.enabled=false", "train.num_rollout=2")
    run_here(recipe, tmp_path / "run", *QUIET, *REFERENCE, *options)
    first, second = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert first["train/kl_loss"] == 0.0 < second["train/kl_loss"]
    assert shadow(tmp_path / "run", 2).keys() == trained_weights(tmp_path / "run", 2).keys()


def test_an_average_that_copies_the_weights_raises_the_alarm_at_the_second_update(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decay 0 for 5 iterations: old policy and trained policy are the same, and nothing says so."""
    options = ("ema.decay_init=0.0", "train.num_rollout=3")
    lines = run_here(recipe, tmp_path / "run", *QUIET, *REFERENCE, *options)
    assert any("ema.decay_init  is 0: in the first 99 updates" in line for line in lines)
    shown = capsys.readouterr().out
    assert shown.count("alarm: after 2 updates the moving average still equals") == 1
    rows = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert [row["train/ema_distance"] for row in rows] == [0.0, 0.0, 0.0]
    assert [row["train/kl_loss"] for row in rows] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "averaged"),
    [
        ("fp32", True),
        ("fp16", True),
        ("bf16 masters", True),
        *(
            pytest.param(dtype, averaged, marks=pytest.mark.slow)
            for dtype, averaged in (
                ("fp32", False),
                ("fp16", False),
                ("bf16", True),
                ("bf16", False),
                ("bf16 masters", False),
                ("fp16 masters", True),
                ("fp16 masters", False),
            )
        ),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    recipe: Path, tmp_path: Path, dtype: str, averaged: bool
) -> None:
    sets = (*QUIET, *NARROW[dtype], *(ROLLED_OUT if averaged else ()))
    run_here(recipe, tmp_path / "straight", *sets, "train.num_rollout=2")
    run_here(recipe, tmp_path / "resumed", *sets, "train.num_rollout=1")
    run_here(recipe, tmp_path / "resumed", *sets, "train.num_rollout=2", resume=True)
    left, right = (state(tmp_path / name, 2) for name in ("straight", "resumed"))
    assert same(left, right)
    assert {t.dtype for name, t in left.items() if name.startswith("ema ")} == (
        {torch.float32} if averaged else set()
    )
    rows = [without_trust(metric_rows(tmp_path / name)) for name in ("straight", "resumed")]
    assert rows[0] == rows[1]
    if dtype == "fp32":
        # the process that resumed replayed with the shadow of the checkpoint, merged by the engine
        assert metric_rows(tmp_path / "resumed")[-1]["trust/parity_worst"] < 2e-6


def test_float16_trains_with_its_scaler_and_keeps_it(recipe: Path, tmp_path: Path) -> None:
    sets = (*QUIET, *NARROW["fp16"], "train.num_rollout=2")
    lines = run_here(recipe, tmp_path / "run", *sets)
    assert any(line.endswith("weights in fp32, dynamic loss scale") for line in lines)
    rows = [row for row in metric_rows(tmp_path / "run") if row["step"] >= 0]
    assert [row["train/loss_scale"] for row in rows] == [65536.0, 65536.0]
    assert [row["train/overflow_steps"] for row in rows] == [0.0, 0.0]
    assert all(0 < row["train/grad_norm"] < 1 for row in rows)
    kept = json.loads((checkpoint_folder(tmp_path / "run", 2) / "scaler.json").read_text())
    assert kept == {"scale": 65536.0, "good_steps": 2, "overflow_steps": 0}


def test_float16_and_float32_take_the_same_step_within_rounding(
    recipe: Path, tmp_path: Path
) -> None:
    """What small gradients lose without a scaler shows in the first step."""
    for name in ("fp32", "fp16"):
        # pictures of float16 weights would have other sizes as JPEG, and so other advantages
        own = ("rollout.local.weights=fp32", "train.num_rollout=1")
        run_here(recipe, tmp_path / name, *QUIET, *NARROW[name], *own)
    norms = [metric_rows(tmp_path / name)[-1]["train/grad_norm"] for name in ("fp32", "fp16")]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_bfloat16_masters_are_stored_as_such(recipe: Path, tmp_path: Path) -> None:
    lines = run_here(
        recipe, tmp_path / "run", *QUIET, *NARROW["bf16 masters"], "train.num_rollout=1"
    )
    assert any("'bf16' loses updates below 1/512 of a weight" in line for line in lines)
    assert {t.dtype for t in trained_weights(tmp_path / "run", 1).values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["true", "false"], ids=["adapters", "full weights"])
def test_two_ranks_average_and_roll_out_what_one_does(
    recipe: Path, tmp_path: Path, lora: str
) -> None:
    sets = (*QUIET, *REFERENCE, "ema.rollout_policy=ema", f"lora.enabled={lora}")
    for ranks in (1, 2):
        words = set_words([*sets, f"cluster.actor_num_gpus_per_node={ranks}"])
        process = start_run(recipe, tmp_path / f"{ranks}", *words, "--set", "train.num_rollout=2")
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    one, two = (shadow(tmp_path / name, 2) for name in ("1", "2"))
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
    rows = [metric_rows(tmp_path / name)[-1] for name in ("1", "2")]
    for key in ("train/ema_distance", "train/kl_loss"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-3)
    assert metric_rows(tmp_path / "2")[-2]["trust/parity_worst"] == 0.0


def test_a_changed_decay_is_said_and_the_checkpoints_holds(recipe: Path, tmp_path: Path) -> None:
    """A new run that starts from another run's checkpoint."""
    run_here(recipe, tmp_path / "first", *QUIET, *ROLLED_OUT, "train.num_rollout=1")
    source = f'checkpoint.load="{tmp_path / "first"}"'
    options = ("ema.decay_init=0.5", source, "train.num_rollout=2")
    run_here(recipe, tmp_path / "second", *QUIET, *ROLLED_OUT, *options)
    assert metric_rows(tmp_path / "second")[-1]["train/ema_decay"] == 0.9
    assert meta(tmp_path / "second", 2)["ema"] == {
        "count": 2,
        "decay_init": 0.9,
        "decay_ramp": 0.001,
        "decay_max": 0.5,
        "decay_flat_steps": 99,
    }


def test_weights_without_a_shadow_start_one(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "first", *QUIET, "train.num_rollout=1")
    source = f'checkpoint.load="{tmp_path / "first"}"'
    run_here(recipe, tmp_path / "second", *QUIET, *ROLLED_OUT, source, "train.num_rollout=2")
    row = metric_rows(tmp_path / "second")[-1]
    assert row["train/ema_updates"] == 1.0
    assert row["trust/parity_worst"] < 2e-6


def test_the_summary_says_whose_pictures_were_scored(recipe: Path, tmp_path: Path) -> None:
    lines = run_here(recipe, tmp_path / "run", *ROLLED_OUT, "train.num_rollout=1")
    assert any("rollouts and evaluations use it, adapter/ holds the trained" in x for x in lines)
    sampler = summary_of(tmp_path / "run")["heldout"]["sampler"]
    assert sampler.endswith("seed 42, moving average of the weights")


def test_the_average_is_exported_on_request(
    recipe: Path, tmp_path: Path, drl: Callable[..., tuple[int, str, str]]
) -> None:
    run = tmp_path / "run"
    run_here(recipe, run, *QUIET, *ROLLED_OUT, "train.num_rollout=2")
    written = {}
    for name, words in (("live", ()), ("average", ("--ema",))):
        out = tmp_path / name
        code, _, problem = drl("export", str(run), "--format", "peft", "--out", str(out), *words)
        assert code == 0, problem
        _, written[name] = read_peft(out)
    assert written["live"].keys() == written["average"].keys()
    for name, tensors in (("live", trained_weights(run, 2)), ("average", shadow(run, 2))):
        # names differ, the tensors are the same ones
        assert sums(tensors) == sums(written[name])
    assert not same(written["live"], written["average"])


def test_a_killed_run_resumes_with_the_same_shadow(
    recipe: Path, tmp_path: Path, zygote: Zygote
) -> None:
    sets = (*QUIET, *ROLLED_OUT, "train.num_rollout=4")
    run_here(recipe, tmp_path / "straight", *sets)
    run_dir = tmp_path / "killed"
    words = ["run", str(recipe), "--run-dir", str(run_dir), *set_words(sets)]
    tracker = run_dir / "checkpoints" / TRACKER
    kill_when(zygote.start(words, run_dir), lambda: tracker.is_file() and last_saved(run_dir) >= 2)
    saved = last_saved(tmp_path / "killed")
    run_here(recipe, tmp_path / "killed", *sets, resume=True)
    assert 2 <= saved <= 4
    left, right = (state(tmp_path / name, 4) for name in ("straight", "killed"))
    assert any(name.startswith("ema ") for name in left)
    assert same(left, right)
    counts: list[Mapping[str, Any]] = [meta(tmp_path / n, 4)["ema"] for n in ("straight", "killed")]
    assert counts[0] == counts[1]
    assert counts[0]["count"] == 4
