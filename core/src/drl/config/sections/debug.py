"""The section ``debug``: modes that leave parts of a run out, dumps, probes and checks for CI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from drl.config.fields import InputFile, Section, named_file
from drl.options import Field, Options

_FIELD = re.compile(r"\{(\w*)[^{}]*\}")


def template(path: Path, *needed: str) -> Path:
    """Refuse, with a ValueError, a path that lacks one of its fields or has a field of another name."""
    text = str(path)
    known = " and ".join(f"{{{name}}}" for name in needed)
    for name in needed:
        if f"{{{name}}}" not in text:
            raise ValueError(f"must contain {known}, so that each file has a name of its own")
    for found in _FIELD.finditer(text):
        if found[0] not in {f"{{{name}}}" for name in needed}:
            raise ValueError(f"must contain {known} and no other field, got {found[0]}")
    return path


def per_rollout(path: Path) -> Path:
    """Check the template of a file per rollout."""
    return template(path, "rollout_id")


def per_rank(path: Path) -> Path:
    """Check the template of a file per rollout and rank."""
    return template(path, "rollout_id", "rank")


RolloutFiles = Annotated[Path, BeforeValidator(named_file), AfterValidator(per_rollout)]
"""A path with ``{rollout_id}``; relative ones start at the file that names them."""

RankFiles = Annotated[Path, BeforeValidator(named_file), AfterValidator(per_rank)]
"""A path with ``{rollout_id}`` and ``{rank}``."""


class CiOptions(Options):
    """A check of a run's evaluations, for continuous integration."""

    enabled: bool = Field(
        default=False,
        strict=True,
        description="At the end, fail unless an evaluation reached the threshold.",
    )
    metric_key: str | None = Field(
        default=None, min_length=1, description="Figure to check, as in the log: eval/NAME."
    )
    metric_threshold: float | None = Field(
        default=None, strict=True, description="The best evaluation must reach this value."
    )


class DebugSection(Section):
    """Modes that leave parts of a run out, dumps of what passes between stages, probes."""

    rollout_only: bool = Field(
        False, description="Generate, score, log and dump rollouts; train nothing, save nothing."
    )
    skip_optimizer_step: bool = Field(
        False, description="Forward passes and figures only: no backward pass, no step."
    )
    save_rollout_data: RolloutFiles | None = Field(
        None,
        description="Write every rollout into a file; evaluations too, with eval_N for {rollout_id}.",
    )
    load_rollout_data: RolloutFiles | None = Field(
        None,
        description="Train on rollouts that save_rollout_data wrote; no engine, no evaluation.",
    )
    load_rollout_subsample: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the groups of a replayed rollout to keep, the first and the last ones.",
    )
    save_train_data: RankFiles | None = Field(
        None, description="Write what each rank trains on in a rollout into a file."
    )
    dump_details: InputFile | None = Field(
        None, description="Folder for both kinds of files, where their own options are unset."
    )
    engine_debug: bool = Field(
        False,
        description="The engine returns its tensors of every step; model outputs are compared with the "
        "trainer's.",
    )
    ci: CiOptions = Field(
        default_factory=CiOptions, description="Check of the evaluations at the end of the run."
    )
