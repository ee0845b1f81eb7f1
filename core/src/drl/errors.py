"""Every error that drl raises on purpose; each also derives from the stdlib exception it specialises.

A message answers: what was wrong, where (recipe path or option), what would be right, what to do.
Errors stay picklable, because they cross process boundaries: constructors take positional values only.
"""

from __future__ import annotations

from dataclasses import dataclass


class DrlError(Exception):
    """Root of drl's errors. ``exit_code`` is what the command line returns for it."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe.

    ``path`` is the dotted option ("" for the whole file), ``message`` says what was given and what
    is allowed, ``line`` the line in the recipe file when known, ``severity`` "error" or "warning".
    """

    path: str
    message: str
    severity: str = "error"
    line: int | None = None


class BadInput(DrlError, ValueError):
    """Something the user gave cannot be used; nothing was started or written."""

    exit_code = 2


class RecipeError(BadInput):
    """A recipe with problems, all of them at once."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(source, problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{self.source} has {count} problem{'s' if count != 1 else ''}"
        return "\n".join([head, *(f"  {line}" for p in self.problems for line in lines_of(p))])


def lines_of(problem: Problem) -> list[str]:
    """Render one problem; continuation lines are indented under the first."""
    where = f"   (line {problem.line})" if problem.line is not None else ""
    first, *rest = problem.message.splitlines()
    head = f"{problem.path}  {first}" if problem.path else first
    return [head + where, *(f"  {line}" for line in rest)]


class UnknownComponent(BadInput, LookupError):
    """No installed plugin offers a component of that name."""

    def __str__(self) -> str:  # LookupError would print the repr of the message
        return str(self.args[0])


class ComponentConflict(BadInput):
    """Two plugins offer the same name, or a name collides with an option of its section."""


class BrokenPlugin(DrlError, ImportError):
    """A plugin that the recipe needs is installed but cannot be loaded."""


class BatchError(BadInput):
    """Batch sizes that do not fit each other; the ids B1 to B18 are in docs/mathematics.md."""


class DataError(BadInput):
    """A data file or folder that cannot be used; names the row."""


class CheckpointError(BadInput):
    """A checkpoint that is missing, damaged or belongs to another recipe."""


class RunDirectoryError(BadInput):
    """A run directory that is in use, absent, or not a run directory."""


class ContractError(DrlError, TypeError):
    """A component broke its interface; names the component and what it returned."""


class EngineError(DrlError, RuntimeError):
    """An engine refused or failed a request."""


class EngineDead(EngineError):
    """An engine stopped answering; carries its last log lines."""


class SyncError(DrlError, RuntimeError):
    """Weights did not arrive as they were sent."""


class TrustError(DrlError, RuntimeError):
    """Rollout and training disagree: log-probs, schedule, settings or versions."""


class CheckFailed(DrlError, AssertionError):
    """A run ended well but did not reach what ``[debug.ci]`` asks for; lists the values."""


class NonFiniteError(DrlError, ArithmeticError):
    """Too many steps in a row had a non-finite loss or gradient."""


class OutOfMemory(DrlError, MemoryError):
    """A GPU has no room for what a phase needs; names the phase and what to change."""


class RankError(DrlError, RuntimeError):
    """A rank of the trainer failed or died, and the others were ended; shows that rank's own words."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message, exit_code)

    def __str__(self) -> str:
        return str(self.args[0])


class RewardError(DrlError, RuntimeError):
    """A reward failed, or a whole rollout has no valid score."""


class Interrupted(DrlError):
    """The user asked the run to end; the state was saved."""

    exit_code = 130
