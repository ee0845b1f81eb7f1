"""``AdvantageEstimator``: rewards of a rollout to advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from drl.types import Advantages, Context, GroupedRewards


class AdvantageEstimator(ABC):
    """Normalise rewards within their groups. ``context.section`` is the recipe's ``[algorithm]``."""

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def advantages(self, rewards: GroupedRewards) -> Advantages:
        """Return one advantage per sample, ``(N,)`` float32; 0 for invalid samples, never NaN.

        ``rewards.rewards`` is the weighted sum of the run's reward terms, ``rewards.terms`` the terms
        themselves where they are known. Losses clamp advantages; estimators leave them as they are.
        """
