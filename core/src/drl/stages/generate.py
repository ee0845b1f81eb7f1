"""One request to its samples: by the engine, or by the recipe's own function around the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drl.errors import ContractError
from drl.stages.trust import check_echoes, check_samples
from drl.types import RolloutRequest, Sample

if TYPE_CHECKING:
    from drl.run import Run


async def generate(run: Run, request: RolloutRequest, *, evaluation: bool = False) -> list[Sample]:
    """Return the samples of one microgroup in the order of its members, held against the request.

    ``rollout.custom_generate`` gets the request as the family edited it. What it returns is checked like
    an engine's answer, but may come without the engine's echoes.
    """
    assert run.engines is not None
    function = run.functions.get("rollout.custom_generate")
    edited = run.family.edit_request(request)
    if function is None:
        samples: Any = await run.engines.generate(edited)
    else:
        made = await function(run, edited, edited.sampling, evaluation=evaluation)
        samples = samples_of(made)
    check_samples(run, request, samples)
    if function is None and not evaluation and run.recipe.trust.settings:
        check_echoes(run.engines.engine.capabilities().echoes, samples)
    return list(samples)


def samples_of(made: object) -> Sequence[Sample]:
    """Return what ``rollout.custom_generate`` made; ContractError when it is no list of samples."""
    if not isinstance(made, (list, tuple)) or not all(isinstance(one, Sample) for one in made):
        raise ContractError(
            f"rollout.custom_generate must return a list of drl.api.Sample, got {named(made)}"
        )
    return made


def named(made: object) -> str:
    """Say what a function returned: its type, of a list also that of its first item."""
    if isinstance(made, (list, tuple)) and made:
        return f"a {type(made).__name__} of {type(made[0]).__name__}"
    return f"a {type(made).__name__}"
