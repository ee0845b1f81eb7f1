"""``epoch_global_random_choice``: one choice per rollout (rl-post-training reference 3.5)."""

from __future__ import annotations

import torch

from drl.builtin.steps_rules import candidate_problems, refuse, with_successors
from drl.interfaces.steps import StepChoice, StepRequest, StepStrategy


class EpochGlobalRandomChoice(StepStrategy):
    """``sde.num_steps`` of the candidates; all samples of a rollout share the choice."""

    def choose(self, request: StepRequest) -> StepChoice:
        """Return the choice; BadInput names the option that does not fit the request."""
        count: int = self.context.section.num_steps
        candidates: tuple[int, ...] = self.options.candidate_steps
        refuse(candidate_problems(candidates, count, request.num_steps))
        if count >= len(candidates):
            return with_successors(candidates)
        generator = torch.Generator("cpu").manual_seed(request.rollout_id + self.context.seed)
        order = torch.randperm(len(candidates), generator=generator)
        return with_successors([candidates[place] for place in order[:count].tolist()])
