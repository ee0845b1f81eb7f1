"""``SdeBackend``: mathematics of one denoising step. ``StepStrategy``: which steps are stochastic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.types import Context, Transition

if TYPE_CHECKING:
    from torch import Tensor


class SdeBackend(ABC):
    """Mathematics of one denoising step. Pure: same inputs, same outputs, float32 inside.

    Constructed as ``SdeBackend(options, context)``; ``context.section`` is the recipe's ``[sde]``
    (``type``, ``noise_level``, ``log_prob_no_const``).
    """

    has_density: bool = True

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma_B: Tensor,
        sigma_next_B: Tensor,
        *,
        sigma_max_B: Tensor,
    ) -> Transition:
        """Return the step from ``sigma_B`` to ``sigma_next_B``.

        ``latents``, ``velocity``: ``(B, *L)`` of any float dtype; sigmas ``(B,)`` with
        ``sigma_next_B < sigma_B``; ``sigma_max_B``: second entry of each row's sigma table.
        """

    @abstractmethod
    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        """Return ``(B,)`` float32: mean over all non-batch axes of the log-density of ``next_latents``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What a strategy may look at; ``seed`` is the seed of the group, never of a microgroup."""

    num_steps: int
    seed: int
    group_index: int
    rollout_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """Stochastic (and trained) step numbers, and the latent numbers to keep; None = all."""

    sde: tuple[int, ...] | None
    kept: tuple[int, ...] | None


class StepStrategy(ABC):
    """Choose the stochastic steps of a group. ``context.section`` is the recipe's ``[sde]``."""

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def choose(self, request: StepRequest) -> StepChoice:
        """Return ascending, unique step numbers; every kept pair has its successor kept."""
