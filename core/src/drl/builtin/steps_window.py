"""``sde_window``: neighbouring steps at a random place (rl-post-training reference 3.5)."""

from __future__ import annotations

import numpy as np

from drl.builtin.steps_rules import refuse, window_problems, with_successors
from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy


class SdeWindow(StepStrategy):
    """``sde.num_steps`` neighbouring steps; the seed of the group decides where they start."""

    def choose(self, request: StepRequest) -> StepChoice:
        """Return the window; BadInput names the option that does not fit the request."""
        count: int = self.context.section.num_steps
        bounds: tuple[int, int] | None = self.options.range
        refuse(window_problems(bounds, count, request.num_steps))
        low, high = bounds if bounds is not None else (0, request.num_steps)
        start = int(np.random.default_rng(request.seed).integers(low, high - count, endpoint=True))
        return with_successors(range(start, start + count))
