"""Checkpoints: written beside, flushed, renamed; the tracker last. Half-written ones are never seen.

Layout: ``checkpoints/iter_0000012/{trainer/, run.json, manifest.json}`` and
``latest_checkpointed_iteration.txt``. The manifest holds the SHA-256 of every file. ``kept.txt`` names
the checkpoints that an evaluation's verdict said to keep, each with its reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from drl.errors import CheckpointError, DrlError
from drl.observe.files import flush_directory, write_text_atomic

if TYPE_CHECKING:
    from drl.interfaces.roles import TrainerRole
    from drl.run import Run

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
KEPT = "kept.txt"


def save_if_due(run: Run, rollout_id: int) -> None:
    """Save by iteration count, by time, at the end, and when the user asked to stop."""
    options = run.recipe.checkpoint
    minutes = (time.monotonic() - run.last_save) / 60
    asked = run.is_last(rollout_id) or run.stop.asked
    counted = options.save_interval and (rollout_id + 1) % options.save_interval == 0
    timed = options.every_minutes and minutes >= options.every_minutes
    if asked or counted or timed:
        save(run, rollout_id)


def save_unless_saved(run: Run, rollout_id: int) -> None:
    """Save an iteration that was not due when its turn came."""
    if run.saved != rollout_id:
        save(run, rollout_id)


def keep_checkpoint(run: Run, rollout_id: int, reason: str) -> None:
    """Make sure that an iteration has a checkpoint, and name it in ``kept.txt``."""
    save_unless_saved(run, rollout_id)
    kept = run.checkpoints / KEPT
    lines = kept.read_text().splitlines() if kept.is_file() else []
    name = checkpoint_name(rollout_id)
    lines = [line for line in lines if line.partition("  ")[0] != name]
    text = " ".join(reason.split())
    write_text_atomic(kept, "\n".join([*lines, f"{name}  {text}"]) + "\n")


def checkpoint_name(rollout_id: int) -> str:
    """Return the folder name of the checkpoint after this iteration."""
    return f"iter_{rollout_id + 1:07d}"


def save(run: Run, rollout_id: int) -> Path:
    """Write one checkpoint and return its folder; a full disk is a DrlError that says what is left."""
    final = run.checkpoints / checkpoint_name(rollout_id)
    with run.phases.phase("save"):
        state = run.state(rollout_id)
        try:
            write_checkpoint(run.trainer, state, final)
            run.save_adapter()
        except (OSError, SafetensorError) as error:
            raise DrlError(
                f"checkpoint {final.name} could not be written: {error}\nearlier checkpoints in "
                f"{final.parent} are untouched; make room there, then go on with --resume"
            ) from error
        run.saved, run.last_save = rollout_id, time.monotonic()
        run.hooks.drl_checkpoint_saved(run=run, path=final)
    run.event(f"saved {final.name}")
    return final


def write_checkpoint(trainer: TrainerRole, state: Mapping[str, Any], final: Path) -> None:
    """Write a checkpoint beside its place, move it there, and let the tracker name it."""
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".writing-*"):  # of a killed writer: this run's lock keeps others out
        shutil.rmtree(left, ignore_errors=True)
    beside = root / f".writing-{final.name}-{os.getpid()}"
    try:
        (beside / "trainer").mkdir(parents=True)
        trainer.save(beside / "trainer")
        (beside / "run.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        write_manifest(beside)
        replace_folder(beside, final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    flush_directory(root)
    write_text_atomic(root / TRACKER, f"{state['next_rollout_id']}\n")


def replace_folder(beside: Path, final: Path) -> None:
    """Move a finished folder into place; one that is there already moves away first."""
    if final.exists():
        old = final.with_name(f".old-{final.name}-{os.getpid()}")
        final.rename(old)
        beside.rename(final)
        shutil.rmtree(old)
    else:
        beside.rename(final)


def write_manifest(folder: Path) -> None:
    """Flush every file to disk and write their digests."""
    digests = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            digests[file.relative_to(folder).as_posix()] = hashlib.file_digest(
                stream, "sha256"
            ).hexdigest()
            os.fsync(stream.fileno())
    write_text_atomic(folder / MANIFEST, json.dumps(digests, indent=2, sort_keys=True) + "\n")
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        flush_directory(path)


def latest(root: Path) -> Path:
    """Return the newest checkpoint, checked against its manifest; CheckpointError names others."""
    tracker = root / TRACKER
    if not tracker.is_file():
        raise CheckpointError(
            f"{root}: no checkpoint to resume from ({TRACKER} is missing); start without --resume"
        )
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{tracker} holds {text!r} where an iteration number belongs{good(root)}"
        )
    folder = root / f"iter_{int(text):07d}"
    problem = damage(folder)
    if problem:
        raise CheckpointError(f"{folder} cannot be used: {problem}{good(root)}")
    return folder


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing"
    try:
        digests: dict[str, Any] = json.loads(manifest.read_text())
    except ValueError:
        return f"{MANIFEST} is not JSON"
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                return f"{name} differs from its checksum"
    return None


def good(root: Path) -> str:
    """Name the newest undamaged checkpoint, as the end of a message."""
    for folder in sorted(root.glob("iter_*"), reverse=True):
        if damage(folder) is None:
            number = int(folder.name.removeprefix("iter_"))
            return (
                f"\n{folder.name} is good: write {number} into {root / TRACKER} to resume from it"
            )
    return "\nthere is no good checkpoint beside it"


def read_run_state(folder: Path) -> dict[str, Any]:
    """Return the run's own part of a checkpoint."""
    state: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return state
