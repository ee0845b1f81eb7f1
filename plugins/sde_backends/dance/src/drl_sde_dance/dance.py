"""One step of flow matching as an SDE of constant diffusion scale (DanceGRPO, arXiv 2505.07818).

``x_sigma = (1 - sigma) x0 + sigma noise``; the velocity predicts ``noise - x0``. Axes: ``B`` rows,
``*L`` latent axes. Element-wise, so rows never influence each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drl.api import BadInput, Context, SdeBackend, Transition
from drl.mathematics.gaussian import log_prob, log_prob_no_const, over_rows


class DanceSde(SdeBackend):
    """Flow-SDE with ``std_dev_t = eta`` at every sigma: noise std ``eta sqrt(-dt)``."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        if context.section.noise_level <= 0:
            raise BadInput(
                f"sde.noise_level is {context.section.noise_level}: noise level 0 gives no density; "
                'set sde.noise_level above 0 (0.3 is usual) or use sde.type = "ode"'
            )

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma_B: Tensor,
        sigma_next_B: Tensor,
        *,
        sigma_max_B: Tensor,
    ) -> Transition:
        """Return mean ``(B, *L)``, noise std and ``std_dev_t`` ``(B,)``, float32.

        The mean is ``x + (v + eta^2 / (2 sigma) e) dt`` with the predicted noise ``e = x + (1 - sigma) v``;
        the score is ``-e / sigma``. Nothing is singular at ``sigma = 1``, so ``sigma_max_B`` plays no part.
        """
        noise_level: float = self.context.section.noise_level
        x, v = latents.float(), velocity.float()
        dt_B = sigma_next_B.float() - sigma_B.float()
        sigma, dt = over_rows(sigma_B.float(), x), over_rows(dt_B, x)
        # DanceGRPO divides by sigma squared, which loses digits in float32 where sigma is small
        noise = x + v * (1 - sigma)
        mean = x + (v + noise * (noise_level**2 / (2 * sigma))) * dt
        std_dev_t_B = torch.full_like(dt_B, noise_level)
        return Transition(
            mean=mean, noise_std=std_dev_t_B * torch.sqrt(-dt_B), std_dev_t=std_dev_t_B
        )

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        """Return ``(B,)`` float32: full Gaussian, or without constants when the recipe says so."""
        if self.context.section.log_prob_no_const:
            return log_prob_no_const(next_latents, transition.mean)
        return log_prob(next_latents, transition.mean, transition.noise_std)
