"""``train``: the order of operations of a training run; everything else is in the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drl.stages.advantage import estimate
from drl.stages.collect import collect
from drl.stages.encode import collect_records
from drl.stages.evaluate import evaluate_before_training, evaluate_if_due
from drl.stages.pairs import make_shards
from drl.stages.save import save_if_due
from drl.stages.sync import sync
from drl.stages.trust import prove_parity_once
from drl.types import Role

if TYPE_CHECKING:
    from drl.run import Run


def train(run: Run) -> None:
    """Collect, estimate, train, save, sync, evaluate: once per iteration, in this order."""
    sync(run, version=run.first_rollout)  # also on resume: engines start from the base checkpoint
    evaluate_before_training(run)
    run.finish_interrupted()
    for rollout_id in run.rollout_ids():
        with run.turn(Role.ROLLOUT):
            rollout = (
                collect(run, rollout_id) if run.needs_rollout else collect_records(run, rollout_id)
            )
        advantages = estimate(run, rollout)
        shards = make_shards(run, rollout, advantages)
        with run.turn(Role.TRAIN):
            prove_parity_once(run, shards)
            for report in run.trainer.train(shards):
                run.take_step(report)
        run.take_rollout(rollout_id, rollout, advantages)
        save_if_due(run, rollout_id)  # before sync: a sync that fails must not cost the iteration
        sync(run, version=rollout_id + 1)
        evaluate_if_due(run, rollout_id)
        run.finish_iteration(rollout_id, rollout)
