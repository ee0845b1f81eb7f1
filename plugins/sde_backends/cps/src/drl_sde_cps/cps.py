"""Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952).

The next latent keeps the noise level that the schedule asks for: fresh noise replaces a part of the
predicted noise instead of being added to it. Axes: ``B`` rows, ``*L`` latent axes. Order of operations
as in flow_grpo and sglang; element-wise, so rows never influence each other.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from drl.api import BadInput, Context, SdeBackend, Transition
from drl.mathematics.gaussian import log_prob_no_const, over_rows


class CpsSde(SdeBackend):
    """``x0_hat (1 - s') + eps_hat sqrt(s'^2 - std^2)``, noise std ``s' sin(eta pi / 2)``."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        if context.section.noise_level <= 0:
            raise BadInput(
                f"sde.noise_level is {context.section.noise_level}: noise level 0 gives no density; "
                'set sde.noise_level above 0 or use sde.type = "ode"'
            )
        if not context.section.log_prob_no_const:
            raise BadInput(
                "sde.log_prob_no_const is false, but sde.type 'cps' has a log-probability without "
                "constants only (its last step has no noise to divide by); set it to true"
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
        """Return mean ``(B, *L)`` and the noise std ``(B,)``, which is ``std_dev_t`` too, float32.

        The last step, to 0, has no noise: ``x - sigma v``. ``sigma_max_B`` plays no part.
        """
        x, v = latents.float(), velocity.float()
        std_B = sigma_next_B.float() * math.sin(self.context.section.noise_level * math.pi / 2)
        sigma, sigma_next = over_rows(sigma_B.float(), x), over_rows(sigma_next_B.float(), x)
        clean = x - sigma * v
        noise = x + v * (1 - sigma)
        # the difference can round to just below 0 at noise level 1, and a root of that is NaN
        kept = (sigma_next**2 - over_rows(std_B, x) ** 2).clamp(min=0).sqrt()
        mean = clean * (1 - sigma_next) + noise * kept
        return Transition(mean=mean, noise_std=std_B, std_dev_t=std_B)

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        """Return ``(B,)`` float32: mean of ``-(x_next - mean)^2``; 0 for an exact last step."""
        return log_prob_no_const(next_latents, transition.mean)
