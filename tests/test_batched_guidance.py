"""``sampling.batched_guidance``: one forward of twice the rows on both sides, where the family allows it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e import write_recipe
from gpu.runs import open_run, roll_out

from drl.api import TrainPipelineConfig
from drl.assemble import launch_of
from drl.errors import BadInput
from drl.trainers import BATCHED, check_guidance, guidance_is_batched


class Rows:
    """Notes how many rows a module is fed, with gradients or without."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.counts: list[tuple[int, bool]] = []
        module.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.counts.append((len(kwargs["hidden_states"]), torch.is_grad_enabled()))


@pytest.mark.parametrize("batched", [False, True])
def test_rollout_and_trainer_agree_to_the_bit(
    tmp_path: Path, checkpoint: Path, batched: bool
) -> None:
    sets = ("sampling.guidance_scale=4.5", "algorithm.kl_beta=0.04", "eval.datasets=[]")
    asked = f"{BATCHED}={str(batched).lower()}"
    recipe = write_recipe(tmp_path, checkpoint)
    with open_run(recipe, tmp_path / "run", *sets, asked) as run:
        assert launch_of(run).batched_guidance is batched
        seen = Rows(run.components["transformer"].module)
        _, shards = roll_out(run)
        report = run.trainer.replay(shards)
        assert report.worst == report.mean == 0.0
        assert sum(report.rows_by_step.values()) == report.rows == 16
        assert set(report.mean_by_step) == set(report.by_step)
        replayed = [rows for rows, _ in seen.counts]
        assert replayed == ([8] * 4 if batched else [4] * 8), "4 micro-batches of 4 pairs"
        seen.counts.clear()
        (step,) = run.trainer.train(shards)
        assert step.skipped is None
        assert {rows for rows, _ in seen.counts} == {8 if batched else 4}
        assert sum(grad for _, grad in seen.counts) == (4 if batched else 8)


class Kinds:
    """A family whose second component needs two forwards."""

    def component_config(self, name: str, checkpoint: str) -> dict[str, str]:
        return {"name": name}

    def pipeline_config(self, name: str, config: dict[str, str]) -> TrainPipelineConfig:
        assert config == {"name": name}
        return TrainPipelineConfig(
            lora_targets=(), wrap=(), batched_guidance=name != "transformer_2"
        )


def recipe_of(*components: str, batched: bool, origin: str) -> Any:
    return SimpleNamespace(
        sampling=SimpleNamespace(batched_guidance=batched),
        model=SimpleNamespace(checkpoint="x", components=components, family="acme"),
        origins={BATCHED: origin},
    )


def test_a_family_that_needs_two_forwards_gets_them_on_both_sides() -> None:
    family: Any = Kinds()
    both = ("transformer", "transformer_2")
    assert guidance_is_batched(recipe_of("transformer", batched=True, origin="auto"), family)
    assert not guidance_is_batched(recipe_of(*both, batched=True, origin="auto"), family)
    assert not guidance_is_batched(recipe_of("transformer", batched=False, origin="auto"), family)


def test_asking_such_a_family_for_one_forward_is_an_error_and_the_default_is_none() -> None:
    family: Any = Kinds()
    both = ("transformer", "transformer_2")
    check_guidance(recipe_of(*both, batched=True, origin="auto"), family)
    check_guidance(recipe_of(*both, batched=False, origin="recipe.toml"), family)
    check_guidance(recipe_of("transformer", batched=True, origin="recipe.toml"), family)
    with pytest.raises(
        BadInput, match=r"batched_guidance is true, but transformer_2 of .*'acme'.*false"
    ):
        check_guidance(recipe_of(*both, batched=True, origin="recipe.toml"), family)
