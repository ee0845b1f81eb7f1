"""The work that a run reports against what torch counts while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e import write_recipe
from gpu.runs import open_run, roll_out
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drl.observe.rates_of_run import RunRates

OBJECTIVES = {
    "policy_loss": (),
    "guidance": ("sampling.guidance_scale=4.5",),
    "reference": ("algorithm.kl_beta=0.1",),
    "full weights": ("lora.enabled=false",),
    "two steps": ("train.num_steps_per_rollout=2",),
}


SLOW = ("reference", "two steps")


@pytest.mark.parametrize(
    "objective",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OBJECTIVES],
)
def test_the_work_of_training_is_what_torch_counts(
    tmp_path: Path, checkpoint: Path, objective: str
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    with open_run(recipe, tmp_path / "run", "eval.datasets=[]", *OBJECTIVES[objective]) as run:
        _, shards = roll_out(run)
        rates = RunRates()
        rates.take_shards(run, shards)
        assert rates.trained.count == 16
        assert rates.trained.unknown == 0
        assert rates.counter is not None
        claimed = rates.counter.pairs(rates.trained.pairs, rates.trained.rescored)
        counted = FlopCounterMode(display=False)
        with counted, sdpa_kernel(SDPBackend.MATH):  # torch does not count the fused CPU kernel
            for report in run.trainer.train(shards):
                assert report.skipped is None
        # the adapters of the first block need no gradient of their input: counted all the same
        assert claimed == pytest.approx(counted.get_total_flops(), rel=0.03)
        assert claimed >= 0.999 * counted.get_total_flops()


def test_the_work_of_a_rollout_is_that_of_its_forwards(tmp_path: Path, checkpoint: Path) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    with open_run(recipe, tmp_path / "run", "eval.datasets=[]") as run:
        rollout, shards = roll_out(run)
        rates = RunRates()
        rates.take_shards(run, shards)
        assert rates.counter is not None
        claimed = rates.counter.samples(rollout.samples)
        counted = FlopCounterMode(display=False)
        with counted, sdpa_kernel(SDPBackend.MATH):  # torch does not count the fused CPU kernel
            run.trainer.replay(shards)
        # the replay has 2 of the 4 steps of each sample, with adapters beside the base
        ((key, pairs),) = rates.trained.pairs.items()
        work = rates.counter.row(*key)
        assert work is not None
        assert counted.get_total_flops() == pairs * (work.forward + work.adapters)
        assert claimed == 4 * len(rollout.samples) * work.forward
