"""``ode_and_return_last``: a deterministic rollout that returns its clean latents alone."""

from __future__ import annotations

from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy


class OdeAndReturnLast(StepStrategy):
    """No stochastic step; only the final latents are kept (rl-post-training reference 3.5)."""

    def choose(self, request: StepRequest) -> StepChoice:
        """Return no step, and the number of the final latents."""
        return StepChoice(sde=(), kept=(request.num_steps,))
