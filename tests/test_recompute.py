"""``recompute_old_log_prob``: the trainer's own log-probs of before the first step, window by window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from odd_sizes import CONTEXT, make_forward, make_samples, make_trainer, windows_of

from drl.errors import BatchError, ContractError
from drl.stages.loss import ENGINE, OLD, Forward, loss_of, score_pairs
from drl.stages.recompute import recomputed
from drl.stages.shards import Layout, shards_of
from drl.stages.upload import Columns
from drl.types import Pair, ScoredTransition, Shard


def shard_of(forward: Forward, steps: int, *, micro: int = 4) -> Shard:
    windows = windows_of(forward, make_samples(2, 4), steps)
    (shard,) = shards_of(windows, Layout(micro_batch_size=micro), rollout_id=3)
    return shard


def rows(shard: Shard, window: int) -> list[Pair]:
    return [pair for batch in shard.windows[window] for pair in batch]


def test_later_windows_get_the_trainers_value_and_keep_the_engines() -> None:
    forward = make_forward(recompute=True)
    before = shard_of(forward, 3)
    after = recomputed(forward, before, CONTEXT)
    assert after.windows[0] is before.windows[0], "its own forward gives the value"
    for window in (1, 2):
        for old, new in zip(rows(before, window), rows(after, window), strict=True):
            scored = score_pairs(forward, [old], CONTEXT)
            assert scored is not None
            assert new.values[OLD] == pytest.approx(scored.joint_log_prob.item(), abs=1e-6)
            assert new.values[ENGINE] == old.values[OLD] != new.values[OLD]
            assert new.tensors is old.tensors
            assert replace(new, values=old.values) == old
    assert after.window_weights == before.window_weights


def test_the_first_windows_ratio_is_exactly_one_and_its_gradient_the_policy_gradient() -> None:
    forward = make_forward(recompute=True)
    pairs = rows(shard_of(forward, 2), 0)
    output = loss_of(forward, pairs, CONTEXT)
    assert float(output.metrics["ratio_abs_minus_1"].total) == 0.0
    assert float(output.metrics["log_prob_mean_abs_diff"].total) == 0.0
    model = forward.models["transformer"]
    got = torch.autograd.grad(output.loss, list(model.parameters()))
    scored = score_pairs(forward, pairs, CONTEXT)
    assert scored is not None
    advantage_B = torch.tensor([pair.values["advantage"] * pair.weight for pair in pairs])
    expected = torch.autograd.grad(
        -(advantage_B * scored.joint_log_prob).sum(), list(model.parameters())
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_difference_to_the_engine_is_logged() -> None:
    forward = make_forward(recompute=True)
    pairs = [pair for pair in rows(shard_of(forward, 2), 0) if pair.weight]
    scored = score_pairs(forward, pairs, CONTEXT)
    assert scored is not None
    engine_B = torch.tensor([pair.values[OLD] for pair in pairs])
    metric = loss_of(forward, pairs, CONTEXT).metrics["log_prob_recompute_abs_diff"]
    expected = (scored.joint_log_prob - engine_B).abs().mean().item()
    assert float(metric.total / metric.count) == pytest.approx(expected, rel=1e-5)
    plain = loss_of(make_forward(), pairs, CONTEXT)
    assert "log_prob_recompute_abs_diff" not in plain.metrics


def test_a_trainer_scores_before_it_steps() -> None:
    """The second window's ratio compares with the weights of before the first step, not of after it."""
    forward = make_forward(recompute=True)
    shard = shard_of(forward, 2)
    before = [score_pairs(forward, [pair], CONTEXT) for pair in rows(shard, 1)]
    first, second = make_trainer(forward).train([shard])
    assert first.skipped is second.skipped is None
    assert first.metrics["train/ratio_abs_minus_1"] == 0.0
    assert second.metrics["train/ratio_abs_minus_1"] > 0.0
    weights = torch.tensor([pair.weight for pair in rows(shard, 1)])
    moved = [
        abs(new.joint_log_prob.item() - old.joint_log_prob.item())
        for new, old in zip(_after_one_step(shard), before, strict=True)
    ]
    expected = (torch.tensor(moved) * weights).sum() / weights.sum()
    assert second.metrics["train/log_prob_mean_abs_diff"] == pytest.approx(
        float(expected), rel=1e-4
    )


def _after_one_step(shard: Shard) -> list[ScoredTransition | None]:
    forward = make_forward(recompute=True)
    next(iter(make_trainer(forward).train([shard])))
    return [score_pairs(forward, [pair], CONTEXT) for pair in rows(shard, 1)]


def test_it_changes_what_is_trained() -> None:
    """The built samples' log-probs are not the trainer's, so the ratios of the two modes differ."""
    losses = []
    for recompute in (False, True):
        forward = make_forward(recompute=recompute)
        first, _ = make_trainer(forward).train([shard_of(forward, 2)])
        losses.append(first.metrics["train/policy_loss"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_dropout_is_off_while_it_scores_and_back_on_afterwards() -> None:
    forward = make_forward(recompute=True)
    model = forward.models["transformer"]
    model.dropout.p = 0.5
    shard = shard_of(forward, 2)
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, arguments: modes.append(module.training))
    list(make_trainer(forward, lr=0.0).train([shard]))
    scored = len(shard.windows[1])
    trained = scored + len(shard.windows[0])
    assert modes == [False] * scored + [True] * trained


def test_windows_of_weight_0_are_not_scored() -> None:
    forward = make_forward(recompute=True)
    shard = replace(shard_of(forward, 3), window_weights=[4.0, 0.0, 4.0])
    after = recomputed(forward, shard, CONTEXT)
    assert after.windows[1] is shard.windows[1]
    assert after.windows[2] is not shard.windows[2]


def test_a_loss_without_transition_has_nothing_to_recompute() -> None:
    forward = make_forward(recompute=True)
    forward.loss.needs = frozenset()
    with pytest.raises(ContractError, match="only losses that need a transition score"):
        recomputed(forward, shard_of(forward, 2), CONTEXT)


def test_a_value_that_no_pair_has_is_named() -> None:
    values = Columns(advantage=torch.ones(1))
    assert values["advantage"].item() == 1.0
    assert "log_prob_old" not in values
    with pytest.raises(BatchError, match=r"'log_prob_old' .*have \['advantage'\].*custom_expand"):
        values["log_prob_old"]


def test_several_components_have_figures_of_their_own() -> None:
    forward = make_forward()
    both = replace(
        forward, models={**forward.models, "transformer_2": make_forward().models["transformer"]}
    )
    pairs = rows(shard_of(forward, 1), 0)
    low = [replace(pair, component="transformer_2") for pair in pairs]
    name = "log_prob_mean_abs_diff"
    alone = loss_of(forward, pairs, CONTEXT).metrics
    assert f"{name}_transformer" not in alone
    for component, batch in (("transformer", pairs), ("transformer_2", low)):
        metrics = loss_of(both, batch, CONTEXT).metrics
        assert metrics[f"{name}_{component}"] == metrics[name]
        assert metrics.keys() == alone.keys() | {f"{name}_{component}"}
