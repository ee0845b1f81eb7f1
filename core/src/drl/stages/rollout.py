"""Requests: which seeds, which steps, which latents. One request is one microgroup of one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drl.errors import ContractError
from drl.interfaces.steps import StepChoice, StepRequest
from drl.mathematics.seeding import sample_seed
from drl.types import Prompt, RolloutRequest, Sampling

if TYPE_CHECKING:
    from drl.interfaces.steps import StepStrategy


def training_sampling(recipe: Any) -> Sampling:
    """Return the settings of a training rollout."""
    return Sampling(
        **_shared(recipe),
        num_steps=recipe.sampling.num_steps,
        sde_type=recipe.sde.type,
        noise_level=recipe.sde.noise_level,
        log_prob_no_const=recipe.sde.log_prob_no_const,
    )


def evaluation_sampling(recipe: Any) -> Sampling:
    """Return the settings of an evaluation: the deterministic sampler, with its own step count."""
    return Sampling(
        **_shared(recipe),
        num_steps=recipe.eval.num_steps or recipe.sampling.num_steps,
        sde_type="ode",
        noise_level=0.0,
        log_prob_no_const=True,
    )


def _shared(recipe: Any) -> dict[str, Any]:
    sampling = recipe.sampling
    return {
        "height": sampling.height,
        "width": sampling.width,
        "num_frames": sampling.num_frames,
        "fps": sampling.fps,
        "flow_shift": sampling.flow_shift,
        "guidance_scale": sampling.guidance_scale,
        "guidance_scale_2": sampling.guidance_scale_2,
        "true_cfg_scale": sampling.true_cfg_scale,
        "negative_prompt": sampling.negative_prompt,
        "generator_device": sampling.generator_device,
    }


def group_requests(
    recipe: Any,
    sampling: Sampling,
    strategy: StepStrategy | None,
    prompt: Prompt,
    group_index: int,
    rollout_id: int,
) -> list[RolloutRequest]:
    """Split one group into requests; all of them share one step choice, drawn from the group's seed."""
    count = recipe.rollout.n_samples_per_prompt
    seeds = [sample_seed(recipe.rollout.seed, group_index, count, m) for m in range(count)]
    request = StepRequest(
        num_steps=sampling.num_steps, seed=seeds[0], group_index=group_index, rollout_id=rollout_id
    )
    choice = choose_steps(strategy, request, recipe.sde.num_steps)
    size = recipe.rollout.microgroup_size
    return [
        RolloutRequest(
            prompt=prompt,
            group_index=group_index,
            members=tuple(range(start, min(start + size, count))),
            seeds=_starts(recipe, seeds)[start : start + size],
            path_seeds=tuple(seeds[start : start + size]) if recipe.rollout.shared_start else None,
            sampling=sampling,
            sde_steps=choice.sde,
            kept_latents=choice.kept,
            debug=recipe.debug.engine_debug,
        )
        for start in range(0, count, size)
    ]


def _starts(recipe: Any, seeds: list[int]) -> tuple[int, ...]:
    """Seeds of the initial latents: one for the whole group when it shares its start."""
    return tuple(seeds[:1] * len(seeds)) if recipe.rollout.shared_start else tuple(seeds)


def choose_steps(strategy: StepStrategy | None, request: StepRequest, count: int) -> StepChoice:
    """Ask the strategy, and hold it to its contract; without one the first ``count`` steps are it.

    Without a stochastic step the final latents are kept: no other loss has a use for a step's.
    """
    if strategy is None and count == 0:
        return StepChoice(sde=(), kept=(request.num_steps,))
    if strategy is None:
        steps = tuple(range(min(count, request.num_steps)))
        return StepChoice(sde=steps, kept=(*steps, len(steps)))
    choice = strategy.choose(request)
    steps = choice.sde or ()
    kept = choice.kept
    if list(steps) != sorted(set(steps)) or any(not 0 <= s < request.num_steps for s in steps):
        raise ContractError(
            f"step strategy {type(strategy).__name__} chose {steps} of {request.num_steps} steps; "
            "numbers must ascend, be unique and lie in the schedule"
        )
    if kept is not None and any(s not in kept or s + 1 not in kept for s in steps):
        raise ContractError(
            f"step strategy {type(strategy).__name__} trains steps {steps} but keeps latents {kept}; "
            "each trained step needs its own latent and the next one"
        )
    return choice
