"""Where a component runs: role, rank, device, run seed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Generator, Tensor


class Role(enum.StrEnum):
    """Which part of a run a component works in."""

    DRIVER = "driver"
    TRAIN = "train"
    ROLLOUT = "rollout"
    REWARD = "reward"


class Need(enum.StrEnum):
    """What a loss asks core to provide."""

    ROLLOUT = "rollout"
    OLD_LOG_PROB = "old_log_prob"
    TRANSITION = "transition"
    OLD_PREDICTION = "old_prediction"
    REFERENCE = "reference"
    GUIDANCE = "guidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a component runs, and what it may know of the run.

    ``section`` holds core's own options of the recipe section that the component is chosen in
    (a loss sees ``recipe.algorithm``, an SDE backend ``recipe.sde``); it is frozen.
    """

    role: Role = Role.DRIVER
    rank: int = 0
    world: int = 1
    device: str = "cpu"
    dtype: str = "fp32"
    run_dir: Path | None = None
    seed: int = 0
    section: Any = None

    def generator(self, purpose: str, *ids: int) -> Generator:
        """Return a CPU generator that depends on run seed, purpose and ids, and on nothing else."""
        from drl.mathematics.seeding import generator

        return generator(self.seed, purpose, *ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """How a model of several denoising phases divides its timesteps among components.

    ``components``: those that are trained; ``component_at`` may name others.
    """

    components: tuple[str, ...]
    component_at: Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext(Context):
    """``Context`` plus the optimizer window that a loss works in.

    ``routes``: given to ``expand`` when the family has several components.
    """

    rollout_id: int = 0
    window: int = 0
    sigmas: Tensor | None = None
    routes: Routes | None = None

    @classmethod
    def within(cls, context: Context, *, section: Any, rollout_id: int = 0) -> StepContext:
        """Return the place of a loss in a run: on the trainer, in the section of its options."""
        return cls(
            role=Role.TRAIN,
            rank=context.rank,
            world=context.world,
            device=context.device,
            dtype=context.dtype,
            run_dir=context.run_dir,
            seed=context.seed,
            section=section,
            rollout_id=rollout_id,
        )
