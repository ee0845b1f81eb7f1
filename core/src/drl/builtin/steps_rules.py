"""What step strategies refuse; shared by the recipe check, which imports no torch, and the classes."""

from __future__ import annotations

from collections.abc import Sequence

from drl.errors import BadInput, Problem
from drl.interfaces.steps import StepChoice

WINDOW_RANGE = "sde.sde_window.range"
CANDIDATES = "sde.epoch_global_random_choice.candidate_steps"


def window_problems(bounds: tuple[int, int] | None, count: int, num_steps: int) -> list[Problem]:
    """Return what is wrong with a window of ``count`` steps inside ``bounds`` of ``num_steps`` steps."""
    problems = _count_problems(count, "sde_window")
    low, high = bounds if bounds is not None else (0, num_steps)
    if not 0 <= low < high <= num_steps:
        message = (
            f"is [{low}, {high}]; it must be two step numbers, first below second, within 0 to "
            f"sampling.num_steps = {num_steps}"
        )
        return [*problems, Problem(WINDOW_RANGE, message)]
    if count > high - low:
        message = (
            f"[{low}, {high}] has room for {high - low} steps, but sde.num_steps is {count}; "
            "widen the range or lower sde.num_steps"
        )
        problems.append(Problem(WINDOW_RANGE, message))
    return problems


def candidate_problems(candidates: Sequence[int], count: int, num_steps: int) -> list[Problem]:
    """Return what is wrong with choosing ``count`` of ``candidates`` among ``num_steps`` steps."""
    problems = _count_problems(count, "epoch_global_random_choice")
    if not candidates:
        message = (
            "is empty and has no safe default; list the steps to choose from, for example [0, 1, 2]"
        )
        problems.append(Problem(CANDIDATES, message))
    beyond = [step for step in candidates if not 0 <= step < num_steps]
    if beyond:
        message = (
            f"holds {beyond}; steps are 0 to {num_steps - 1} (sampling.num_steps = {num_steps})"
        )
        problems.append(Problem(CANDIDATES, message))
    if len(set(candidates)) < len(candidates):
        problems.append(Problem(CANDIDATES, f"holds a step twice: {list(candidates)}"))
    return problems


def refuse(problems: Sequence[Problem]) -> None:
    """Raise BadInput with every problem, or return."""
    if problems:
        raise BadInput("\n".join(f"{problem.path} {problem.message}" for problem in problems))


def with_successors(steps: Sequence[int]) -> StepChoice:
    """Return a choice of these steps that keeps latents ``s`` and ``s + 1`` of each."""
    kept = {number for step in steps for number in (step, step + 1)}
    return StepChoice(sde=tuple(sorted(steps)), kept=tuple(sorted(kept)))


def _count_problems(count: int, strategy: str) -> list[Problem]:
    if count > 0:
        return []
    message = f"is {count}; sde.step_strategy '{strategy}' needs the number of stochastic steps"
    return [Problem("sde.num_steps", message)]
