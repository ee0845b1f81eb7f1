"""Runs with the loss ``nft``: old policy with and without an average, equal bits, killed and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import Course
from e2e import (
    RECIPE,
    final_state,
    metric_rows,
    run_here,
    same,
    trained_weights,
    without_trust,
    write_recipe,
)
from killing import Zygote
from torch import Tensor

from drl.model.trainer import Trainer

CHANGES = {
    '[sde]\ntype = "cps"\nstep_strategy = "sde_window"\nnum_steps = 2\n': '[sde]\ntype = "ode"\n',
    "\n[sde.sde_window]\nrange = [0, 3]\n": "",
    "[algorithm.policy_loss]\nclip_range = 1e-2\n": '[algorithm]\nloss = "nft"\n',
}
TWO_STEPS = ("train.num_steps_per_rollout=2",)
AVERAGE = ("ema.enabled=true", "ema.rollout_policy=ema", "ema.decay_ramp=0.4", "ema.decay_max=0.8")
QUIET = ("eval.before_train=false", "eval.after_train=false")


def nft_recipe() -> str:
    """The tiny recipe with deterministic rollouts and the loss ``nft``."""
    text = RECIPE
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The tiny recipe of this loss."""
    return write_recipe(tmp_path_factory.mktemp("nft"), checkpoint, nft_recipe())


@pytest.mark.parametrize("sets", [(), AVERAGE, ("sde.step_strategy=ode_and_return_last",)])
def test_two_iterations_train_and_repeat_to_the_bit(
    recipe: Path, tmp_path: Path, sets: tuple[str, ...]
) -> None:
    for name in ("one", "two"):
        run_here(recipe, tmp_path / name, *QUIET, *TWO_STEPS, *sets)
    rows = metric_rows(tmp_path / "one")
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
        assert row["train/grad_norm"] > 0
        assert row["train/skipped_steps"] == 0
        # 4 steps at fraction 0.99
        assert row["train/nft_num_timesteps"] == 3
        assert row["train/nft_loss"] == pytest.approx(3 * row["train/nft_loss_per_pair"])
        assert row["train/loss"] == row["train/nft_loss_per_pair"]
        assert row["train/nft_old_abs_diff"] > 0
        assert 0 < row["train/nft_r_mean"] < 1
    assert rows == metric_rows(tmp_path / "two")
    assert same(final_state(tmp_path / "one"), final_state(tmp_path / "two"))


def test_micro_batches_do_not_change_the_loss(recipe: Path, tmp_path: Path) -> None:
    losses = []
    for size in (2, 5, 24):
        folder = tmp_path / str(size)
        run_here(recipe, folder, *QUIET, "train.num_rollout=1", f"train.micro_batch_size={size}")
        losses.append(metric_rows(folder)[0]["train/loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.fixture
def old_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What each optimizer step finds: the trained weights before it, and those of the old policy."""
    found: list[dict[str, Any]] = []
    original = Trainer._step

    def weights(trainer: Trainer) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in trainer.named_parameters()}

    def step(trainer: Trainer, shard: Any, window: int) -> Any:
        assert trainer.forward.old is not None
        facts = {"window": window, "live": weights(trainer)}
        with trainer.forward.old("transformer"):
            facts["old"] = weights(trainer)
        assert same(facts["live"], weights(trainer))
        found.append(facts)
        return original(trainer, shard, window)

    monkeypatch.setattr(Trainer, "_step", step)
    return found


def test_without_an_average_the_old_policy_is_what_the_rollout_was_made_with(
    recipe: Path, tmp_path: Path, old_weights: list[dict[str, Any]]
) -> None:
    run_here(recipe, tmp_path / "run", *QUIET, *TWO_STEPS)
    assert [facts["window"] for facts in old_weights] == [0, 1, 0, 1]
    for place, facts in enumerate(old_weights):
        start = old_weights[place - facts["window"]]
        assert same(facts["old"], start["live"])
        assert same(facts["old"], facts["live"]) == (facts["window"] == 0)


def test_with_an_average_the_old_policy_is_the_average_of_before_the_rollout(
    recipe: Path, tmp_path: Path, old_weights: list[dict[str, Any]]
) -> None:
    run_here(recipe, tmp_path / "run", *QUIET, *TWO_STEPS, *AVERAGE, "checkpoint.save_interval=1")
    first, second, third, fourth = old_weights
    assert same(first["old"], first["live"])
    assert same(second["old"], first["old"])
    for name, average in third["old"].items():
        # decay 0.4 at the first update
        expected = torch.lerp(first["live"][name], third["live"][name], 0.6)
        torch.testing.assert_close(average, expected)
    assert same(fourth["old"], third["old"])
    assert not same(third["old"], third["live"])
    assert same(third["live"], trained_weights(tmp_path / "run", 1))


@pytest.mark.parametrize("sets", [(), AVERAGE], ids=["weights", "average"])
def test_two_ranks_train_as_one(recipe: Path, tmp_path: Path, sets: tuple[str, ...]) -> None:
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        of_ranks = f"cluster.actor_num_gpus_per_node={ranks}"
        run_here(recipe, folder, *QUIET, *TWO_STEPS, *sets, "optimizer.eps=1e-4", of_ranks)
        found.append(trained_weights(folder, 2))
    one, two = found
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


def test_a_kl_term_has_a_reference_of_its_own(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "run", *QUIET, *TWO_STEPS, *AVERAGE, "algorithm.kl_beta=0.1")
    rows = metric_rows(tmp_path / "run")
    assert all(row["train/kl_loss"] > 0 for row in rows)
    assert rows[0]["train/loss"] == pytest.approx(
        rows[0]["train/nft_loss_per_pair"] + 0.1 * rows[0]["train/kl_loss"], rel=1e-6
    )


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("sde.step_strategy=sde_window", "sde.num_steps=2"), "trains on the final ones"),
        (("sde.num_steps=2",), "keeps the latents of the first 2 steps"),
        (("algorithm.kl_beta=0.1", *AVERAGE, "algorithm.ref_mode=ema"), "is the old policy that"),
        (("algorithm.kl_beta=0.1", "algorithm.ref_mode=none"), "needs a reference"),
        (("algorithm.kl_beta=0.1", "lora.enabled=false"), "set lora.enabled = true"),
        (("algorithm.ref_mode=ema",), "set ema.enabled = true"),
        (("train.train_only=true",), "trains on rollouts"),
        (("model.components=transformer,transformer_2",), "trains one component"),
        (
            ("algorithm.loss=policy_loss", "sde.type=cps", "sde.step_strategy=ode_and_return_last"),
            "has no stochastic step",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(
    recipe: Path, drl: Callable[..., tuple[int, str, str]], sets: tuple[str, ...], words: str
) -> None:
    arguments = [word for setting in sets for word in ("--set", setting)]
    code, out, problem = drl("config", "check", str(recipe), *arguments)
    assert code == 2, out
    assert words in " ".join((out + problem).split())


@pytest.mark.parametrize(
    ("sets", "warning"),
    [
        ((), None),
        (AVERAGE, None),
        (("sde.num_steps=4", "sde.type=sde"), None),
        (("sampling.guidance_scale=4.5",), "another policy than the old one"),
        (("sde.type=sde", "sde.step_strategy=all"), None),
        (("sde.step_strategy=all",), "'ode_and_return_last' sends less"),
        (("ema.enabled=true",), "did not make the samples"),
        (("algorithm.ref_mode=lora_base",), "is not used: algorithm.kl_beta is 0"),
    ],
)
def test_deterministic_rollouts_are_accepted(
    recipe: Path,
    drl: Callable[..., tuple[int, str, str]],
    sets: tuple[str, ...],
    warning: str | None,
) -> None:
    arguments = [word for setting in sets for word in ("--set", setting)]
    code, out, problem = drl("config", "check", str(recipe), *arguments)
    text = " ".join((out + problem).split())
    assert code == 0, text
    assert ("warning" in text) == (warning is not None), text
    assert warning is None or warning in text


@pytest.mark.parametrize("sets", [(), AVERAGE], ids=["weights", "average"])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    zygote: Zygote, recipe: Path, tmp_path: Path, sets: tuple[str, ...]
) -> None:
    course = Course.run(zygote, recipe, tmp_path, *sets)
    course.kill_before(tmp_path / "run", "open checkpoints/.latest", 2)
    course.finish(tmp_path / "run")
    course.kill_at(tmp_path / "other", 0.6)
    course.finish(tmp_path / "other")
    rows = without_trust(metric_rows(course.straight))
    assert [row["step"] for row in rows] == [-1, 0, 1, 2]
