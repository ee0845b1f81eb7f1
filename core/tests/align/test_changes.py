"""Causes on a model followed by hand: what is tried, what is named, and that nothing stays changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from drl.align import forwards, records
from drl.align.changes import (
    Finding,
    Scene,
    by_weight,
    causes_among,
    find_causes,
    otherwise,
    try_change,
    verdict,
)
from drl.align.measure import average, over_rows, score, without_dropout, worst
from drl.align.probe import KINDS
from drl.lora import LoraConfig, inject
from drl.model.precision import own_dtype_class
from drl.types import Guidance, Sample

Make = Callable[..., Scene]


def named(scene: Scene) -> list[str]:
    return [one.name for one in causes_among(findings(scene))]


def findings(scene: Scene) -> list[Finding]:
    found = score(scene.replay, scene.batches)
    base = average(found), worst(found)
    still = without_dropout(scene.replay)
    rows = over_rows(still, scene.pairs, forwards.sizes(scene))
    of_rows = forwards.rows_of_a_forward(scene, still, rows)
    return [*of_rows, *find_causes(scene, base, KINDS)]


def test_rows_of_the_engines_forward_are_named(scene: Make) -> None:
    made = scene(by_rows=0.01, engine_rows=8, rows=2, scale=1.0)
    assert named(made) == ["forwards of 8 rows"]
    (cause,) = causes_among(findings(made))
    assert "together at 8" in cause.meaning
    assert cause.max == 0.0


def test_an_uncommon_number_of_rows_is_tried_too(scene: Make) -> None:
    made = scene(by_rows=0.01, engine_rows=6, rows=2, scale=1.0)
    assert named(made) == ["forwards of 6 rows"]


def test_compiled_blocks_are_tried_at_the_rows_in_use_alone(scene: Make) -> None:
    made = replace(scene(engine_rows=6, rows=2), compiled=True)
    assert forwards.sizes(made) == [2, 6]


@pytest.mark.parametrize("batched", [True, False])
def test_joint_guidance_on_one_side_is_named(scene: Make, batched: bool) -> None:
    made = scene(by_rows=0.01, batched_guidance=batched)
    trainer = replace(made.replay.forward, batched_guidance=not batched)
    made = replace(made, replay=replace(made.replay, forward=trainer))
    where = "one forward" if batched else "two forwards"
    assert f"guidance in {where}" in named(made)
    text = next(one.meaning for one in findings(made) if one.name == f"guidance in {where}")
    assert "sampling.batched_guidance" in text


def test_guidance_of_another_scale_is_no_cause_that_is_known(scene: Make) -> None:
    made = scene(guidance={"guidance_scale": Guidance(scale=2.5)})
    assert named(made) == []


def test_dropout_alone_is_not_blamed_on_rows(scene: Make) -> None:
    made = scene(dropout=0.5, scale=1.0, engine_rows=8, rows=2)
    still = without_dropout(made.replay)
    assert not still.training
    assert named(made) == ["evaluation mode (no dropout)"]
    assert {one.spread for one in over_rows(still, made.pairs, forwards.sizes(made))} == {0.0}
    odd = scene(by_rows=0.01, dropout=0.5, scale=1.0, engine_rows=8, rows=2)
    assert "forwards of 8 rows" in named(odd)
    (of_rows,) = [one for one in findings(odd) if one.name == "forwards of 8 rows"]
    assert of_rows.on_top_of == (forwards.EVALUATION,)
    assert without_dropout(scene().replay).training


def test_masks_are_the_same_each_time_and_leave_the_callers_numbers_alone(scene: Make) -> None:
    made = scene(dropout=0.5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = score(made.replay, made.batches)
    assert torch.equal(torch.rand(3), expected)
    assert score(made.replay, made.batches) == first
    assert worst(first) > 0


def test_dropout_is_taken_off_before_other_causes_are_looked_for(scene: Make) -> None:
    made = scene(by_rows=0.0, dropout=0.5, guidance={"guidance_scale": Guidance()})
    assert set(named(made)) == {"no guidance", "evaluation mode (no dropout)"}
    tried = {one.name: one for one in findings(made)}
    assert tried["no guidance"].max == 0.0, "which needs evaluation mode as well"


def test_an_exact_difference_ends_the_search(scene: Make) -> None:
    made = scene(dropout=0.5)
    tried = find_causes(made, (1.0, 1.0), KINDS)
    assert [one.name for one in tried] == ["evaluation mode (no dropout)"]
    assert tried[0].verdict == "cause"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((1e-4, 1e-3), (0.0, 0.0), "cause"),
        ((1e-4, 1e-3), (1e-5, 1e-4), "cause"),
        ((1e-4, 1e-3), (1e-5, 6e-4), "none"),
        ((1e-4, 1e-3), (4e-5, 3e-4), "part"),
        ((1e-4, 1e-3), (2e-4, 1e-3), "none"),
        ((2e-9, 1e-8), (1e-10, 1e-9), "none"),
        ((2e-9, 1e-8), (0.0, 0.0), "cause"),
        ((float("nan"), float("nan")), (1e-9, 1e-9), "part"),
        ((float("nan"), float("nan")), (float("nan"), 1e-9), "none"),
        ((1e-4, 1e-3), (float("nan"), float("nan")), "none"),
    ],
)
def test_verdicts(before: tuple[float, float], after: tuple[float, float], said: str) -> None:
    assert verdict(before, after) == said


def test_a_part_is_shown_where_nothing_explains_it_all() -> None:
    def found(name: str, verdict: str, mean: float = 1.0) -> Finding:
        return Finding(name=name, meaning="", verdict=verdict, mean=mean, max=mean)

    some = [found("a", "none"), found("b", "part", 3.0), found("c", "part", 2.0)]
    assert [one.name for one in causes_among(some)] == ["c", "b"]
    assert [one.name for one in causes_among([*some, found("d", "cause")])] == ["d"]
    order = by_weight([found("n", "none", float("nan")), *some, found("x", "failed")])
    assert [one.name for one in order] == ["c", "b", "a", "n", "x"]


def test_a_kernel_that_cannot_run_is_told_and_stops_nothing(scene: Make) -> None:
    made = scene()

    def around() -> Any:
        raise RuntimeError("no such kernel\nat line 7")

    change = otherwise(made, "odd", "never", replace(made.replay, around=around))
    found = try_change(change, (1.0, 1.0))
    assert found.verdict == "failed"
    assert found.meaning == "cannot run here: no such kernel"


def test_a_family_that_guides_otherwise_leaves_the_real_one_alone(scene: Make) -> None:
    family = scene().replay.forward.family
    before = dict(vars(family))
    p, u = torch.tensor([3.0]), torch.tensor([1.0])
    guidance = Guidance(scale=2.0)
    twin = forwards.guided_by(family, forwards.exchanged)
    assert twin.guide({"visual": p}, {"visual": u}, guidance)["visual"].item() == -1.0
    assert family.guide({"visual": p}, {"visual": u}, guidance)["visual"].item() == 5.0
    again = forwards.guided_by(family, forwards.from_positive)
    assert again.guide({"visual": p}, {"visual": u}, guidance)["visual"].item() == 5.0
    assert vars(family) == before


def test_negative_first_predicts_the_same_by_other_rows(scene: Make) -> None:
    made = scene()
    forward = made.replay.forward
    joint = replace(forward, family=forwards.negative_first(forward.family), batched_guidance=True)
    assert worst(score(replace(made.replay, forward=joint), made.batches)) < 1e-6


def test_a_merge_in_bf16_rounds_twice_and_leaves_the_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    generator = torch.Generator().manual_seed(0)
    config = LoraConfig(rank=4, alpha=4.0, target_modules=("0",), init="random")
    inject(model, config, generator=generator)
    layer = model.get_submodule("0")
    base = layer.base_layer.weight.detach().clone()
    A, B = (getattr(layer, name)["default"].weight.detach() for name in ("lora_A", "lora_B"))
    with forwards.merged({"transformer": model}, lower=torch.bfloat16):
        merged = layer.base_layer.weight.detach().clone()
    expected = base.bfloat16() + (B @ A).bfloat16()
    assert torch.allclose(merged, expected.float(), atol=1e-2, rtol=0)
    assert torch.equal(merged, merged.bfloat16().float())
    with forwards.merged({"transformer": model}, lower=None):
        right = layer.base_layer.weight.detach().clone()
    assert torch.allclose(right, base + B @ A, atol=1e-6, rtol=0)
    assert (merged - right).abs().max() > 1e-4
    assert torch.equal(layer.base_layer.weight, base)


def test_stored_latents_are_made_again_from_the_engines_tensors(scene: Make) -> None:
    pair = replace(scene().pairs[0], unit=7, values={**scene().pairs[0].values, "step": 1.0})
    means, noises = torch.randn(3, 4, 1, 4, 4), torch.randn(3, 4, 1, 4, 4)
    debug = {
        "prev_sample_means": means,
        "variance_noises": noises,
        "noise_std_devs": torch.tensor([0.5, 0.25, 0.0]),
    }
    sample = sample_with(debug)
    changed = records.before_storing(pair, {7: sample})
    assert torch.allclose(changed.tensors["visual"], means[0] + 0.5 * noises[0])
    assert torch.allclose(changed.tensors["visual.next"], means[1] + 0.25 * noises[1])
    first = replace(pair, values={**pair.values, "step": 0.0})
    kept = records.before_storing(first, {7: sample})
    assert torch.equal(kept.tensors["visual"], first.tensors["visual"]), "it was drawn"


def sample_with(debug: dict[str, torch.Tensor]) -> Sample:
    from drl.testing import make_sample

    sample = make_sample(index=7, steps=3)
    assert sample.trajectory is not None
    sample.trajectory = replace(sample.trajectory, debug=debug)
    return sample


def test_latents_that_are_bf16_numbers_already_are_not_rounded_once_more(scene: Make) -> None:
    made = scene()
    low = made.with_pairs(
        lambda pair: replace(pair, tensors=records.rounded(pair.tensors, torch.bfloat16))
    )
    made = replace(made, batches=low)
    tried = [change.name for change in records.stored_latents(made)]
    assert "stored latents rounded to bf16" not in tried
    assert records.precision(made) == "all of them bf16 numbers"


def test_an_engine_that_computes_with_rounded_latents_is_named(scene: Make) -> None:
    made = scene()
    low = made.with_pairs(
        lambda pair: replace(pair, tensors=records.rounded(pair.tensors, torch.bfloat16))
    )
    figures = score(made.replay, low)
    handed = made.with_pairs(
        lambda pair: replace(
            pair, values={**pair.values, "log_prob_old": figures[pair.id].log_prob}
        )
    )
    assert named(replace(made, batches=handed)) == ["stored latents rounded to bf16"]


def test_the_own_schedule_is_tried_only_where_it_differs(scene: Make) -> None:
    made = scene()
    sigmas = torch.tensor([0.75, 0.5, 0.25])
    # of the pairs of step 0 sigma_max is the second entry of their table
    made = replace(made, sigmas=sigmas, timesteps=1000 * sigmas[:-1])
    names = [change.name for change in records.schedules(made)]
    assert names == ["the trainer's own sigma table"]
    table = sigmas.tolist()
    changed = records.of_table(made.pairs[0], table, [750.0, 500.0])
    assert (changed.sigma, changed.timestep) == (0.75, 750.0)
    assert changed.values["sigma_next"] == 0.5
    assert changed.values["sigma_max"] == 0.5
    same = replace(
        made, batches=made.with_pairs(lambda p: records.of_table(p, table, [750.0, 500.0]))
    )
    assert [*records.schedules(same)] == []


def test_eager_blocks_are_tried_where_the_trainer_alone_is_compiled(scene: Make) -> None:
    made = replace(scene(), compiled=True)
    (change,) = forwards.eager_blocks(made)
    assert (change.name, change.kept) == ("eager blocks", "always")
    both = replace(made, engine_options={"compile": True})
    neither = replace(scene(), blocks={"transformer": ("Gain",)})
    engine = replace(neither, engine_options={"compile": True})
    assert [*forwards.eager_blocks(both), *forwards.compiled_blocks(both)] == []
    assert [*forwards.eager_blocks(neither), *forwards.compiled_blocks(neither)] == []
    assert [change.name for change in forwards.compiled_blocks(engine)] == ["compiled blocks"]


def test_a_second_cause_is_found_on_top_of_eager_blocks(scene: Make) -> None:
    made = compiled_scene(scene(guidance={"guidance_scale": Guidance()}))
    tried = {one.name: one for one in findings(made)}
    assert tried["eager blocks"].verdict != "cause"
    assert tried["no guidance"].max == 0.0
    assert tried["no guidance"].on_top_of == ("eager blocks",)


def compiled_scene(made: Scene) -> Scene:
    """Let the model of a scene compute otherwise once its blocks are compiled."""
    (model,) = made.replay.forward.models.values()
    eager = model.forward

    def forward(x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return eager(x, text) + (0.01 if torch.compiler.is_compiling() else 0.0)

    model.forward = forward
    model.compile(backend="eager", dynamic=False)
    return replace(made, compiled=True)


def test_a_model_that_computes_otherwise_when_compiled_is_named(scene: Make) -> None:
    made = compiled_scene(scene(scale=1.0))
    base = score(made.replay, made.batches)
    tried = find_causes(made, (average(base), worst(base)), KINDS)
    assert worst(base) > 0
    assert [(one.name, one.verdict, one.max) for one in tried] == [("eager blocks", "cause", 0.0)]


def test_attention_kernels_are_not_tried_on_compiled_blocks_and_it_is_said(scene: Make) -> None:
    made = replace(scene(), compiled=True, engine_options={"compile": True})
    (found,) = find_causes(made, (1.0, 1.0), [forwards.attention])
    assert found.verdict == "untried"
    assert "keep the kernel that they were compiled with" in found.meaning
    eager = replace(made, engine_options={"compile": False})
    assert len([*forwards.attention(eager)]) == len(forwards.KERNELS)


class Rounded(torch.nn.Module):
    """A norm with a dtype of its own between layers in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.last = torch.nn.Linear(4, 4)
        self.bfloat16()
        self.norm.float()
        self.norm.__class__ = own_dtype_class(torch.nn.LayerNorm, torch.float32, torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def test_a_copy_in_float32_computes_in_it_everywhere() -> None:
    model = Rounded()
    twin = forwards.in_full(model)
    assert twin(torch.randn(2, 4)).dtype == torch.float32
    assert type(twin.norm) is torch.nn.LayerNorm
    assert type(model.norm) is not torch.nn.LayerNorm
    assert model(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
    whole = torch.nn.Linear(2, 2)
    assert forwards.in_full(whole) is whole


def test_the_float32_copy_has_the_weights_of_the_engine(scene: Make) -> None:
    made = scene()
    (model,) = made.replay.forward.models.values()
    model.to(torch.bfloat16)

    @contextmanager
    def averaged() -> Iterator[None]:
        model.gain.data.add_(1.0)
        yield
        model.gain.data.sub_(1.0)

    forward = replace(made.replay.forward, dtype="bf16")
    made = replace(made, replay=replace(made.replay, forward=forward, around=averaged))
    (change,) = forwards.precision(made)
    assert change.replay.forward.models["transformer"].gain.item() == 1.5
    assert model.gain.item() == 0.5


def test_scenes_are_not_changed_by_a_search(scene: Make) -> None:
    made = scene(by_rows=0.01, dropout=0.5)
    weights = copy.deepcopy(made.replay.forward.models["transformer"].state_dict())
    findings(made)
    after = made.replay.forward.models["transformer"].state_dict()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert made.replay.training
