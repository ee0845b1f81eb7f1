"""One step of flow matching: as an SDE that keeps the marginals (Flow-GRPO, arXiv 2505.05470), and as an ODE.

``x_sigma = (1 - sigma) x0 + sigma noise``; the velocity predicts ``noise - x0``. Axes: ``B`` rows,
``*L`` latent axes. The order of the operations is that of flow_grpo and sglang, because results are
compared with theirs bit by bit; every operation is element-wise, so rows never influence each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drl.api import BadInput, Context, SdeBackend, Transition
from drl.mathematics.gaussian import log_prob, log_prob_no_const, over_rows


class FlowSde(SdeBackend):
    """Flow-SDE: ``std_dev_t = eta sqrt(sigma / (1 - sigma))``, noise ``std_dev_t sqrt(-dt)``."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        if context.section.noise_level <= 0:
            raise BadInput(
                f"sde.noise_level is {context.section.noise_level}: noise level 0 gives no density; "
                'set sde.noise_level above 0 (0.7 is usual) or use sde.type = "ode"'
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
        """Return mean ``(B, *L)``, noise std and ``std_dev_t`` ``(B,)``, float32."""
        std_dev_t_B = self.std_dev_t(sigma_B.float(), sigma_max_B.float())
        return sde_transition(latents, velocity, sigma_B, sigma_next_B, std_dev_t_B)

    def std_dev_t(self, sigma_B: Tensor, sigma_max_B: Tensor) -> Tensor:
        """Return the diffusion scale ``(B,)``.

        At ``sigma = 1`` the denominator takes the second entry of the sigma table; "is 1" means
        isclose, because some tables start at 0.999993.
        """
        is_one = torch.isclose(sigma_B, torch.ones_like(sigma_B))
        below_one = torch.where(is_one, sigma_max_B, sigma_B)
        noise_level: float = self.context.section.noise_level
        return torch.sqrt(sigma_B / (1 - below_one)) * noise_level

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        """Return ``(B,)`` float32: full Gaussian, or without constants when the recipe says so."""
        if self.context.section.log_prob_no_const:
            return log_prob_no_const(next_latents, transition.mean)
        return log_prob(next_latents, transition.mean, transition.noise_std)


class FlowOde(SdeBackend):
    """Euler step ``x + v dt``. ``log_prob`` is a squared distance for probing, not a density."""

    has_density = False

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma_B: Tensor,
        sigma_next_B: Tensor,
        *,
        sigma_max_B: Tensor,
    ) -> Transition:
        """Return the Euler step as the mean ``(B, *L)``, with zero noise ``(B,)``, float32."""
        zero_B = torch.zeros_like(sigma_B, dtype=torch.float32)
        dt = over_rows(sigma_next_B.float() - sigma_B.float(), latents)
        mean = latents.float() + velocity.float() * dt
        return Transition(mean=mean, noise_std=zero_B, std_dev_t=zero_B)

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        """Return ``(B,)`` float32: mean of ``-(x_next - mean)^2``."""
        return log_prob_no_const(next_latents, transition.mean)


def sde_transition(
    latents: Tensor, velocity: Tensor, sigma_B: Tensor, sigma_next_B: Tensor, std_dev_t_B: Tensor
) -> Transition:
    """Return the Flow-SDE step for a given diffusion scale (Flow-GRPO).

    A constant scale gives DanceGRPO's step (arXiv 2505.07818). Latents and velocity ``(B, *L)`` of any
    float dtype, the rest ``(B,)``.
    """
    dt_B = sigma_next_B.float() - sigma_B.float()
    sigma, dt = over_rows(sigma_B.float(), latents), over_rows(dt_B, latents)
    std_dev_t = over_rows(std_dev_t_B, latents)
    mean = (
        latents.float() * (1 + std_dev_t**2 / (2 * sigma) * dt)
        + velocity.float() * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
    )
    return Transition(mean=mean, noise_std=std_dev_t_B * torch.sqrt(-dt_B), std_dev_t=std_dev_t_B)
