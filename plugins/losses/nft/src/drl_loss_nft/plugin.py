"""Declares the loss ``nft`` and what it asks of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drl.api import Component, Problem, hookimpl

DRL_API = (1, 0)

WINDOWED = ("sde_window", "epoch_global_random_choice")
"""Strategies that keep the latents of the stochastic steps alone."""


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer DiffusionNFT."""
    return [
        Component(
            "nft",
            "drl_loss_nft.loss:Nft",
            summary="Contrast of two policies around the old one on noised final latents (DiffusionNFT).",
            config="drl_loss_nft.config:NftConfig",
            facts={
                "needs": ("rollout", "old_prediction"),
                "step_share": "timestep_fraction",
            },
        )
    ]


@hookimpl
def drl_check_recipe(recipe: Any) -> Iterable[Problem]:
    """Say what keeps the final latents from coming back, and which model it cannot train."""
    if recipe.algorithm.loss != "nft":
        return
    strategy, count = recipe.sde.step_strategy, recipe.sde.num_steps
    if strategy in WINDOWED:
        yield Problem(
            "sde.step_strategy",
            f"{strategy!r} keeps the latents of stochastic steps, but algorithm.loss 'nft' trains on the "
            "final ones: use 'ode_and_return_last', or leave it out with sde.num_steps = 0",
        )
    elif strategy is None and 0 < count < recipe.sampling.num_steps:
        yield Problem(
            "sde.num_steps",
            f"is {count}, which keeps the latents of the first {count} steps, but algorithm.loss 'nft' "
            "trains on the final ones and on no step: set it to 0",
        )
    elif strategy == "all" and recipe.sde.type == "ode":
        yield Problem(
            "sde.step_strategy",
            "'all' keeps every latent, of which algorithm.loss 'nft' reads the last: "
            "'ode_and_return_last' sends less",
            "warning",
        )
    if any(scale is not None and scale > 1 for scale in _scales(recipe)):
        yield Problem(
            "sampling.guidance_scale",
            "is above 1: algorithm.loss 'nft' trains and compares without guidance, so the samples come from "
            "another policy than the old one; 1 makes them agree",
            "warning",
        )
    if len(recipe.model.components) > 1:
        yield Problem(
            "model.components",
            f"algorithm.loss 'nft' trains one component, got {', '.join(recipe.model.components)}",
        )


def _scales(recipe: Any) -> tuple[float | None, ...]:
    return recipe.sampling.guidance_scale, recipe.sampling.true_cfg_scale
