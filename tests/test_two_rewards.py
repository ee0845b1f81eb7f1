"""A run with two rewards on very different scales: ``grpo`` follows the large one, ``gdpo`` both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import metric_rows, run_here
from torch import Tensor

from drl.builtin.advantage_gdpo import Gdpo
from drl.builtin.advantage_grpo import Grpo
from drl.types import Advantages, GroupedRewards

STRANGERS = ("acme-shades",)
TERMS = '[{name="acme_red"}, {name="acme_green"}, {name="jpeg", weight=0}]'
TEXT_OF_ONE = '[reward]\ntype = "jpeg"\n'
QUIET = ("eval.before_train=false", "eval.after_train=false", "train.num_rollout=1")


@pytest.fixture
def two_rewards(recipe: Path) -> Path:
    """The tiny recipe with two terms that count and one that is only logged."""
    text = recipe.read_text()
    assert text.count(TEXT_OF_ONE) == 1
    file = recipe.with_name("two.toml")
    file.write_text(text.replace(TEXT_OF_ONE, f"[reward]\nterms = {TERMS}\n"))
    return file


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GroupedRewards, Tensor]]:
    """What each estimator of a run was asked, and what it answered."""
    seen: list[tuple[GroupedRewards, Tensor]] = []
    for kind in (Grpo, Gdpo):
        original = kind.advantages

        def advantages(self: Any, rewards: GroupedRewards, answer: Any = original) -> Advantages:
            found: Advantages = answer(self, rewards)
            seen.append((rewards, found.values))
            return found

        monkeypatch.setattr(kind, "advantages", advantages)
    return seen


def correlation(one_N: Tensor, other_N: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one_N.double(), other_N.double()]))[0, 1])


def per_group(rewards: GroupedRewards, values_N: Tensor) -> list[tuple[float, float]]:
    """Correlation of the advantages with the large and with the small term, group by group."""
    assert rewards.terms is not None
    members = [rewards.group_ids == number for number in rewards.group_ids.unique().tolist()]
    return [
        (
            correlation(values_N[group], rewards.terms[group, 0]),
            correlation(values_N[group], rewards.terms[group, 1]),
        )
        for group in members
    ]


def test_grpo_follows_the_large_term_and_gdpo_both(
    two_rewards: Path, tmp_path: Path, estimated: list[tuple[GroupedRewards, Tensor]]
) -> None:
    for name in ("grpo", "gdpo"):
        chosen = f"algorithm.advantage_estimator={name}"
        run_here(two_rewards, tmp_path / name, *QUIET, chosen)
    (rewards, summed), (same, decoupled) = estimated
    assert rewards.names == same.names == ("acme_red", "acme_green")
    assert rewards.terms is not None
    assert same.terms is not None
    assert torch.equal(rewards.terms, same.terms)
    assert float(rewards.terms[:, 0].std()) > 1e3 * float(rewards.terms[:, 1].std())
    for large, _ in per_group(rewards, summed):
        assert large > 0.999
    for large, small in per_group(rewards, decoupled):
        # the sum of two terms of one spread lies at one angle to both
        assert large == pytest.approx(small, abs=0.02)
    assert float((summed - decoupled).abs().max()) > 0.1
    (plain,), (row,) = metric_rows(tmp_path / "grpo"), metric_rows(tmp_path / "gdpo")
    assert row["rollout/informative_groups/acme_red"] == 1.0
    assert row["rollout/informative_groups/acme_green"] == 1.0
    assert "rollout/informative_groups/jpeg" not in row
    assert row["rollout/reward/jpeg_mean"] == plain["rollout/reward/jpeg_mean"]
    assert row["train/adv_abs_mean"] == pytest.approx(float(decoupled.abs().mean()), rel=1e-5)
    assert row["train/grad_norm"] > 0


def test_the_weights_of_the_terms_steer_gdpo(
    two_rewards: Path, tmp_path: Path, estimated: list[tuple[GroupedRewards, Tensor]]
) -> None:
    text = two_rewards.read_text().replace('name="acme_red"', 'name="acme_red", weight=1e-7')
    two_rewards.write_text(text)
    run_here(two_rewards, tmp_path / "run", *QUIET, "algorithm.advantage_estimator=gdpo")
    ((rewards, values_N),) = estimated
    assert rewards.weights == (1e-7, 1.0)
    assert all(small > 0.999 for _, small in per_group(rewards, values_N))


def test_without_the_step_over_the_batch_the_std_grows_with_the_terms(
    two_rewards: Path, tmp_path: Path, estimated: list[tuple[GroupedRewards, Tensor]]
) -> None:
    chosen = ("algorithm.advantage_estimator=gdpo", "algorithm.gdpo.batch_normalization=false")
    run_here(two_rewards, tmp_path / "off", *QUIET, *chosen)
    run_here(two_rewards, tmp_path / "on", *QUIET, chosen[0])
    (_, raw), (_, divided) = estimated
    assert float(divided.std()) == pytest.approx(1.0, abs=1e-3)
    assert torch.allclose(raw / (raw.std() + 1e-4), divided, atol=1e-5)
