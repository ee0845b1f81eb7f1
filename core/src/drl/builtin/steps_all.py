"""``all``: every step."""

from __future__ import annotations

from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy


class AllSteps(StepStrategy):
    """Every denoising step is stochastic, and every latent is kept."""

    def choose(self, request: StepRequest) -> StepChoice:
        """Return all steps of the request."""
        return StepChoice(sde=tuple(range(request.num_steps)), kept=None)
