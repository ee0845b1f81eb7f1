"""``train``: the order of operations of a training run; everything else is in the stages.

A mode leaves stages out: a replay has no engine, so ``sync`` and ``evaluate`` find nothing to do, and
``roll_out`` is what ``debug.rollout_only`` leaves of the loop.

Sampling, training and syncs follow one another and never overlap: ``gather`` and ``evaluate`` return when
every sample is made, ``sync`` when the engine serves the new weights. An engine that computes with the
trainer's own frozen weights, in a thread of its own on the same device, rests on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drl.stages.advantage import estimate
from drl.stages.alignment import with_debug_tensors
from drl.stages.collect import collect
from drl.stages.dump import dump_rollout, dump_shards
from drl.stages.encode import collect_records
from drl.stages.evaluate import evaluate_before_training, evaluate_if_due
from drl.stages.pairs import make_shards
from drl.stages.replay import replay
from drl.stages.residence import for_sampling, for_training
from drl.stages.save import save_if_due
from drl.stages.sync import sync
from drl.stages.trust import prove_parity_once
from drl.types import Role

if TYPE_CHECKING:
    from drl.run import Run
    from drl.types import Advantages, Rollout


def train(run: Run) -> None:
    """Collect, estimate, train, save, sync, evaluate: once per iteration, in this order."""
    sync(run, version=run.first_rollout)  # also on resume: engines start from the base checkpoint
    evaluate_before_training(run)
    run.finish_interrupted()
    with run.long_lived:
        for rollout_id in run.rollout_ids():
            iterate(run, rollout_id)


def iterate(run: Run, rollout_id: int) -> None:
    """Do one iteration. What it made ends with it: device and host never hold two rollouts."""
    rollout = gather(run, rollout_id)
    dump_rollout(run, rollout)
    advantages = estimate(run, rollout)
    learn(run, rollout, advantages)
    run.take_rollout(rollout_id, rollout, advantages)
    save_if_due(run, rollout_id)  # before sync: a sync that fails must not cost the iteration
    sync(run, version=rollout_id + 1)
    evaluate_if_due(run, rollout_id)
    run.finish_iteration(rollout_id, rollout)  # loggers get its samples, hence it is still there


def learn(run: Run, rollout: Rollout, advantages: Advantages | None) -> None:
    """Train on a rollout; its shards, and what a loss computed for them, are gone before the sync."""
    shards = with_debug_tensors(run, make_shards(run, rollout, advantages), rollout)
    dump_shards(run, shards)
    run.rates.take_shards(run, shards)
    for_training(run)
    with run.turn(Role.TRAIN):
        prove_parity_once(run, shards)
        for report in run.trainer.train(shards):
            run.take_step(report)


def roll_out(run: Run) -> None:
    """Evaluate once, then collect: no training, so nothing is saved and no weights change."""
    sync(run, version=run.first_rollout)
    evaluate_before_training(run)
    with run.long_lived:
        for rollout_id in run.rollout_ids():
            roll_out_once(run, rollout_id)


def roll_out_once(run: Run, rollout_id: int) -> None:
    """Collect one rollout, which ends with this call as in ``iterate``, and log it."""
    rollout = gather(run, rollout_id)
    dump_rollout(run, rollout)
    run.take_rollout(rollout_id, rollout, None)
    run.finish_iteration(rollout_id, rollout)


def gather(run: Run, rollout_id: int) -> Rollout:
    """Return the samples of an iteration: replayed from a file, generated, or recorded by the data."""
    for_sampling(run)
    with run.turn(Role.ROLLOUT), run.rates.rollout(run):
        if run.recipe.debug.load_rollout_data is not None:
            return replay(run, rollout_id)
        return collect(run, rollout_id) if run.needs_rollout else collect_records(run, rollout_id)
