"""Find the family of a checkpoint when the recipe names none: installed families claim it."""

from __future__ import annotations

import json
import os.path
from pathlib import Path
from typing import Any

from drl.config.draft import Draft, NotKnown
from drl.config.layers import AUTO
from drl.config.places import is_file, is_folder
from drl.types import CheckpointFacts, Claim


def place_checkpoint(draft: Draft) -> None:
    """Make a checkpoint that is a folder absolute; refuse a path where there is none."""
    _place(draft, "model.checkpoint")


def place_encoders(draft: Draft) -> None:
    """Do the same with the checkpoint of the encoders, where there is one."""
    _place(draft, "data.sft_encoder_checkpoint")


def _place(draft: Draft, key: str) -> None:
    given, owner = draft.get(key), draft.tree.owner(key)
    if owner is None or given is None:
        return
    # os.path.expanduser leaves "~stranger" alone, Path.expanduser raises.
    folder = owner.base / os.path.expanduser(given)
    if is_folder(folder):
        draft.put(key, str(folder), owner.origin)
    elif given.startswith((".", "/", "~")) or "/" not in given:
        draft.error(key, f"there is no folder {folder}; a hub id reads owner/name")


def claim_family(draft: Draft) -> None:
    """Set ``model.family`` from the claims of the installed plugins, unless the recipe names a family."""
    family, by_path = draft.get("model.family"), draft.get("model.pipeline_config")
    if by_path is not None and family not in (None, by_path):
        draft.error(
            "model.pipeline_config",
            f"and model.family = {family!r} are both given; keep one of them",
        )
    elif by_path is not None:
        draft.put("model.family", by_path, AUTO)
        return
    if family is not None:
        return
    checkpoint = draft.get("model.checkpoint")
    facts = CheckpointFacts(reference=checkpoint, model_index=_model_index(draft, checkpoint))
    answers = draft.catalog.ask("drl_claim_checkpoint", {"checkpoint": facts})
    claims = [claim for _, claim in answers if isinstance(claim, Claim)]
    if not claims:
        have = ", ".join(draft.catalog.names("family")) or "none"
        message = f"no installed family claims {checkpoint!r}; set model.family\ninstalled: {have}"
        draft.error("model.family", message)
        return
    best = max(_strength(claim) for claim in claims)
    winners = sorted({claim.family for claim in claims if _strength(claim) == best})
    if len(winners) > 1:
        names = " and ".join(repr(name) for name in winners)
        message = f"{names} both claim {checkpoint!r}; set model.family to one of them"
        draft.error("model.family", message)
        return
    draft.put("model.family", winners[0], AUTO)


def _strength(claim: Claim) -> tuple[bool, int]:
    """A class beats a name pattern, a longer pattern a shorter one."""
    return (claim.by == "class", len(claim.pattern))


def _model_index(draft: Draft, checkpoint: str) -> dict[str, Any] | None:
    """Return the parsed model_index.json of a local folder, or None for a hub id."""
    file = Path(checkpoint) / "model_index.json"
    if not is_file(file):
        return None
    try:
        index = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        draft.error("model.checkpoint", f"{file} cannot be read: {error}")
        raise NotKnown("model.checkpoint") from None
    return index if isinstance(index, dict) else None
