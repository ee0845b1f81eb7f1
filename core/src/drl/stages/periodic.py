"""When something that happens every so many iterations is due."""

from __future__ import annotations

from typing import Any


def due(recipe: Any, done: int, interval: int | None) -> bool:
    """True after every ``interval`` iterations, and after each pass over the data where these are counted.

    ``interval`` None or 0: never (rl-post-training reference 1.1).
    """
    if not interval:
        return False
    per_epoch = recipe.rollouts_per_epoch
    return done % interval == 0 or (per_epoch is not None and done % per_epoch == 0)
