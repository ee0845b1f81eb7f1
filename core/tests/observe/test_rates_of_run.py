"""Rates of an iteration, on work that is counted by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_trainer import trainer as small_trainer
from torch import nn

from drl.interfaces.family import Flops, RowShape
from drl.lora import LoraConfig, inject
from drl.model.build import Component
from drl.model.compiled import Compilations
from drl.model.idle import Idle
from drl.observe.rates_of_run import RunRates, compilations_of, shares
from drl.observe.timing import Timeline
from drl.observe.work import begins_in_first_block
from drl.types import ConditionRecord, Need, Pair, Rollout, Sample, Shard, Trajectory

FORWARD, BACKWARD, INPUTS = 1e12, 2e12, 0.75e12
TIMES = {"perf/rollout_time": 2.0, "perf/train_time": 4.0, "perf/step_time": 6.0}


class Known:
    """A family whose rows cost the same whatever the weights; every layer sees the text tokens."""

    components = ("transformer",)
    streams = ("visual",)
    work: Flops | None = Flops(forward=FORWARD, backward=BACKWARD, input_gradient=INPUTS)
    asked = 0

    def component_config(self, component: str, checkpoint: str) -> dict[str, Any]:
        return {}

    def flops(self, component: str, config: Any, shape: RowShape) -> Flops | None:
        assert (component, shape) == ("transformer", RowShape(latent=(4, 2, 2), text_tokens=5))
        self.asked += 1
        return self.work

    def layer_rows(self, component: str, config: Any, shape: RowShape, layer: str) -> int | None:
        return shape.text_tokens


class Layerless(Known):
    """Knows its own work and not that of its layers."""

    def layer_rows(self, component: str, config: Any, shape: RowShape, layer: str) -> int | None:
        return None


def record(tokens: int = 5) -> ConditionRecord:
    return ConditionRecord(tensors={"encoder_hidden_states": torch.zeros(tokens, 8)})


def pair_of(weight: float = 1.0) -> Pair:
    tensors = {"visual": torch.zeros(4, 2, 2)}
    return Pair(id=(0, 0), unit=0, sigma=0.5, weight=weight, tensors=tensors, condition=record())


def shard_of(*windows: list[list[float]]) -> Shard:
    """A shard from the weights of its pairs: windows of micro-batches."""
    made = [[tuple(pair_of(weight) for weight in batch) for batch in window] for window in windows]
    weights = [sum(map(sum, window)) for window in windows]
    return Shard(rollout_id=0, windows=made, window_weights=weights)


def sample_of(steps: int = 10) -> Sample:
    trajectory = Trajectory(
        latents={"visual": torch.zeros(2, 4, 2, 2)},
        latent_steps=(0, steps),
        sigmas=torch.zeros(steps + 1),
        timesteps=torch.zeros(steps),
        log_probs=torch.zeros(steps),
        sde_steps=(),
    )
    prompt: Any = None
    return Sample(
        index=0,
        group_index=0,
        member=0,
        prompt=prompt,
        seed=0,
        trajectory=trajectory,
        condition=record(),
    )


def run_of(family: Any, **changed: Any) -> Any:
    """What RunRates looks at in a run: of a loss that needs nothing, trained in full, on the CPU."""
    needs = changed.pop("needs", frozenset())
    loss = SimpleNamespace(
        needs=needs,
        rows_per_pair=changed.pop("rows_per_pair", 1),
        recomputes_old_log_prob=changed.pop("recomputes", False),
    )
    sampling = {"height": 16, "width": 16, "num_frames": 1, "fps": None, "flow_shift": None}
    sampling |= {"guidance_scale": changed.pop("guidance", 1.0), "guidance_scale_2": None}
    sampling |= {"true_cfg_scale": None, "negative_prompt": None, "generator_device": "cpu"}
    recipe = SimpleNamespace(
        model=SimpleNamespace(checkpoint="somewhere"),
        sampling=SimpleNamespace(**sampling, num_steps=10),
        sde=SimpleNamespace(type="ode", noise_level=0.0, log_prob_no_const=True),
        debug=SimpleNamespace(skip_optimizer_step=changed.pop("skip", False)),
        train=SimpleNamespace(forward_dtype="fp32"),
    )
    counts = changed.pop("counts", {})
    engine = SimpleNamespace(counts=lambda: dict(counts))
    defaults = {
        "family": family,
        "loss": loss,
        "components": {},
        "recipe": recipe,
        "context": SimpleNamespace(device="cpu"),
        "engines": SimpleNamespace(engine=engine),
        "ranks": 1,
        "trainer": Idle(),
    }
    return SimpleNamespace(**(defaults | changed))


def figures_of(run: Any, *shards: Shard, samples: int = 0, rates: RunRates | None = None) -> Any:
    rates = RunRates() if rates is None else rates
    rates.take_shards(run, shards)
    groups: Any = [SimpleNamespace(samples=[sample_of() for _ in range(samples)])]
    rollout = Rollout(rollout_id=0, version=0, groups=groups)
    return rates.figures(run, rollout, TIMES, Timeline(seconds=6.0))


def test_images_and_their_work_are_per_second_of_the_rollout() -> None:
    figures = figures_of(run_of(Known()), samples=8)
    assert figures["perf/images_per_second"] == 4.0
    assert figures["perf/rollout_tflops"] == pytest.approx(8 * 10 * 1.0 / 2.0)


def test_guidance_is_two_forwards_a_step() -> None:
    figures = figures_of(run_of(Known(), guidance=4.5), samples=8)
    assert figures["perf/rollout_tflops"] == pytest.approx(2 * 8 * 10 * 1.0 / 2.0)


def test_pairs_with_weight_count_over_all_ranks_and_filler_stands_apart() -> None:
    first = shard_of([[1.0, 1.0], [1.0, 0.0]])
    second = shard_of([[1.0, 1.0], [0.0, 0.0]])
    figures = figures_of(run_of(Known(), ranks=2), first, second)
    assert figures["perf/pairs_per_second"] == 5 / 4.0
    assert figures["perf/filler_rows"] == 3.0
    assert figures["perf/train_tflops"] == pytest.approx(5 * 3.0 / 4.0)


def test_a_window_without_weight_is_no_work_and_no_filler() -> None:
    figures = figures_of(run_of(Known()), shard_of([[0.0, 0.0]], [[1.0, 0.0]]))
    assert figures["perf/pairs_per_second"] == 1 / 4.0
    assert figures["perf/filler_rows"] == 1.0


@pytest.mark.parametrize(
    ("changed", "tflop"),
    [
        ({}, 3.0),
        ({"skip": True}, 1.0),
        ({"rows_per_pair": 2}, 6.0),
        ({"needs": frozenset({Need.REFERENCE})}, 4.0),
        ({"needs": frozenset({Need.OLD_PREDICTION, Need.REFERENCE})}, 5.0),
        ({"needs": frozenset({Need.GUIDANCE}), "guidance": 4.5}, 6.0),
        ({"needs": frozenset({Need.GUIDANCE}), "guidance": 1.0}, 3.0),
        ({"guidance": 4.5}, 3.0),
        ({"recomputes": True}, 3.0),
    ],
)
def test_the_forwards_that_an_objective_asks_for_are_work(
    changed: dict[str, Any], tflop: float
) -> None:
    figures = figures_of(run_of(Known(), **changed), shard_of([[1.0, 1.0]]))
    assert figures["perf/train_tflops"] == pytest.approx(2 * tflop / 4.0)


def test_log_probs_are_recomputed_in_windows_after_the_first() -> None:
    run = run_of(Known(), recomputes=True)
    figures = figures_of(run, shard_of([[1.0]], [[1.0, 1.0]], [[1.0]]))
    assert figures["perf/train_tflops"] == pytest.approx((4 * 3.0 + 3 * 1.0) / 4.0)


class Block(nn.Sequential):
    """What the small family calls its blocks."""


def adapted(*targets: str) -> dict[str, Component]:
    module = nn.Sequential(Block(nn.Linear(8, 6)), Block(nn.Linear(6, 8)))
    lora = LoraConfig(rank=2, alpha=2, target_modules=targets)
    inject(module, lora, generator=torch.Generator())
    config: Any = SimpleNamespace(wrap=("Block",))
    return {"transformer": Component(module=module, config=config, lora=lora)}


def test_frozen_weights_cost_no_gradient_and_adapters_cost_three_forwards() -> None:
    components = adapted("0.0")
    run = run_of(Known(), components=components)
    adapters = 2 * 5 * (2 * 8 + 6 * 2)  # A and B of the first layer, five text tokens
    figures = figures_of(run, shard_of([[1.0]]))
    assert figures["perf/train_tflops"] * 4.0 * 1e12 == pytest.approx(
        FORWARD + INPUTS + 3 * adapters, rel=1e-12
    )
    unknown = run_of(Layerless(), components=components)
    assert "perf/train_tflops" not in figures_of(unknown, shard_of([[1.0]]))


def test_training_of_adapters_that_begin_after_the_first_block_is_not_known() -> None:
    said: list[str] = []
    run = run_of(Known(), components=adapted("1.0"), event=said.append)
    rates = RunRates()
    for _ in range(2):
        figures = figures_of(run, shard_of([[1.0]]), samples=4, rates=rates)
        assert "perf/train_tflops" not in figures
        assert figures["perf/pairs_per_second"] == 0.25
        assert figures["perf/rollout_tflops"] == pytest.approx(4 * 10 * 1.0 / 2.0)
    (text,) = said
    assert "nothing up to the first block of 'transformer' is trained" in text
    skipping = run_of(Known(), components=adapted("1.0"), skip=True, event=said.append)
    assert figures_of(skipping, shard_of([[1.0]]))["perf/train_tflops"] > 1.0 / 4.0
    assert len(said) == 1


def test_what_is_trained_before_the_blocks_takes_the_backward_pass_through_all_of_them() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Block(nn.Linear(8, 6)), Block(nn.Linear(6, 8)))
    component = replace(adapted("1.0")["transformer"], module=module)
    module.requires_grad_(False)
    module[2].requires_grad_(True)
    assert not begins_in_first_block(component)
    module[0].bias.requires_grad_(True)
    assert begins_in_first_block(component)
    module[0].requires_grad_(False)
    module[1][0].bias.requires_grad_(True)
    assert begins_in_first_block(component)
    module[1].requires_grad_(False)
    blockless: Any = SimpleNamespace(wrap=())
    assert begins_in_first_block(replace(component, config=blockless))


def test_unknown_work_gives_no_figures_rather_than_zeros() -> None:
    family = Known()
    family.work = None
    figures = figures_of(run_of(family), shard_of([[1.0]]), samples=4)
    assert "perf/train_tflops" not in figures
    assert "perf/rollout_tflops" not in figures
    assert figures["perf/pairs_per_second"] == 0.25
    assert figures["perf/images_per_second"] == 2.0


def test_pairs_of_unknown_size_are_counted_without_work() -> None:
    bare = replace(pair_of(), condition=None)
    shard = Shard(rollout_id=0, windows=[[(bare, pair_of())]], window_weights=[2.0])
    figures = figures_of(run_of(Known()), shard)
    assert figures["perf/pairs_per_second"] == 0.5
    assert "perf/train_tflops" not in figures


def test_the_family_is_asked_once_for_each_size() -> None:
    family = Known()
    run, rates = run_of(family), RunRates()
    for _ in range(3):
        figures_of(run, shard_of([[1.0, 1.0]]), samples=4, rates=rates)
    assert family.asked == 1


def test_what_was_trained_on_before_is_not_counted_again() -> None:
    run, rates = run_of(Known()), RunRates()
    figures_of(run, shard_of([[1.0]]), rates=rates)
    rollout = Rollout(rollout_id=1, version=0, groups=[])
    later = rates.figures(run, rollout, TIMES, Timeline(seconds=6.0))
    assert "perf/pairs_per_second" not in later


def test_utilisation_is_the_share_of_what_all_devices_promise() -> None:
    run, rates = run_of(Known(), ranks=2), RunRates()
    figures_of(run, rates=rates)  # finds no peak on a CPU
    rates.peak_tflops = 100.0
    figures = figures_of(run, shard_of([[1.0] * 4]), samples=4, rates=rates)
    assert figures["perf/train_mfu"] == pytest.approx(4 * 3.0 / 4.0 / 200.0)
    assert figures["perf/rollout_mfu"] == pytest.approx(4 * 10 / 2.0 / 100.0)


def test_on_a_cpu_there_is_no_utilisation_and_nothing_is_said_of_it() -> None:
    figures = figures_of(run_of(Known()), shard_of([[1.0]]), samples=1)
    assert not [name for name in figures if name.endswith("_mfu")]


def test_filler_rows_are_those_of_the_rollout_and_graphs_those_of_the_iteration() -> None:
    counts = {"filler_rows": 3.0, "recompilations": 1.0, "rows": 8.0}
    run, rates = run_of(Known(), counts=counts), RunRates()
    names = ("perf/rollout_filler_rows", "perf/recompilations")
    for filler, graphs in ((2.0, 1.0), (0.0, 3.0)):
        with rates.rollout(run):
            counts["filler_rows"] += filler
        counts["filler_rows"] += 5.0  # an evaluation's
        figures = figures_of(run, rates=rates)
        assert [figures[name] for name in names] == [filler, graphs]
        counts["recompilations"] += 3.0
    assert "perf/recompilations" not in figures_of(run_of(Known()))


def test_the_trainers_graphs_are_found_behind_ranks_and_idle_trainers() -> None:
    assert compilations_of(Idle()) is None
    assert compilations_of(object()) is None
    trainer = small_trainer()
    assert compilations_of(trainer) is None
    trainer.compilations = Compilations("trainer", backend="eager")
    assert compilations_of(trainer) is trainer.compilations
    assert compilations_of(Idle(trainer)) is trainer.compilations


def test_the_drivers_share_is_what_neither_parts_nor_rewards_use() -> None:
    times = {
        "perf/step_time": 10.0,
        "perf/rollout_time": 5.0,
        "perf/train_time": 3.0,
        "perf/update_weights_time": 1.0,
        "perf/dump_time": 0.25,
        "perf/unaccounted_time": 0.75,
        "perf/train_wait_time": 7.0,
    }
    timeline = Timeline(
        seconds=10.0,
        phases={"rollout": ((1.0, 6.0),)},
        beside={"generate": ((1.0, 2.0), (2.0, 4.0)), "reward": ((2.0, 3.0), (4.0, 5.5))},
    )
    figures = shares(times, timeline)
    # in the rollout: 3 s of generation, then 1.5 s of rewards alone, then 0.5 s of nothing
    assert figures == {
        "perf/reward_wait_seconds": pytest.approx(1.5),
        "perf/driver_share": pytest.approx((0.75 + 0.25 + 0.5) / 10.0),
    }


def test_a_rollout_that_does_not_say_when_it_worked_counts_as_work() -> None:
    times = {"perf/step_time": 4.0, "perf/rollout_time": 3.0, "perf/unaccounted_time": 1.0}
    timeline = Timeline(seconds=4.0, phases={"rollout": ((0.0, 3.0),)})
    assert shares(times, timeline) == {"perf/driver_share": 0.25}
    assert shares({"perf/step_time": 0.0}, Timeline(seconds=0.0)) == {}
