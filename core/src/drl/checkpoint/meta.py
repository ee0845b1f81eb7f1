"""``meta.json``: where a checkpoint is in its run, what wrote it, and which base model it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drl.errors import CheckpointError
from drl.observe.files import write_json_atomic

META = "meta.json"
SAMPLES = 16
"""Places of a weights file that its fingerprint reads; two fine-tunings differ at every one."""

SAMPLE_BYTES = 65536


def read_meta(folder: Path) -> dict[str, Any]:
    """Return ``meta.json`` of a checkpoint folder; CheckpointError when it is missing or no table."""
    return read_table(folder / META)


def read_table(file: Path) -> dict[str, Any]:
    """Return a JSON table of a checkpoint; CheckpointError names the file when there is none."""
    try:
        found: Any = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} is no checkpoint of drl: it has no {file.name}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); use an earlier checkpoint of the run"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds {type(found).__name__}, not a table")
    return found


def add_to_meta(folder: Path, facts: Mapping[str, object]) -> None:
    """Add what the driver knows to what the trainer wrote."""
    write_json_atomic(folder / META, read_meta(folder) | dict(facts))


def base_model(checkpoint: str, components: Iterable[str]) -> dict[str, Any]:
    """Return what identifies the weights that training started from.

    ``{"checkpoint": path, "components": {name: {"config": SHA-256, "weights": fingerprint}}}``. The
    fingerprint is over sizes and samples of the weights files, so it costs milliseconds. A checkpoint
    that is no local folder has its name only.
    """
    root = Path(checkpoint)
    found = {name: folder_digest(root / name) for name in components if (root / name).is_dir()}
    return {"checkpoint": checkpoint, "components": found}


def folder_digest(folder: Path) -> dict[str, str]:
    """Return the digests of one component's folder."""
    config = folder / "config.json"
    text = config.read_bytes() if config.is_file() else b""
    weights = hashlib.sha256()
    for file in sorted(
        path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")
    ):
        weights.update(f"{file.name} {file.stat().st_size}\n".encode())
        _sample(file, weights)
    return {"config": hashlib.sha256(text).hexdigest(), "weights": weights.hexdigest()}


def _sample(file: Path, digest: hashlib._Hash) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))


def check_base(folder: Path, base: Mapping[str, Any]) -> None:
    """Raise CheckpointError when a checkpoint that lacks the frozen weights needs another base model.

    What is compared is content where both sides have it, so a base model may have been moved; else
    the names.
    """
    meta = read_meta(folder)
    saved = meta.get("base")
    if not isinstance(saved, dict) or meta.get("trained_parameters") == meta.get("all_parameters"):
        return
    theirs, ours = saved.get("components") or {}, base["components"]
    same = (
        all(theirs.get(name) == digest for name, digest in ours.items())
        if theirs and ours
        else saved.get("checkpoint") == base["checkpoint"]
    )
    if not same:
        raise CheckpointError(
            f"{folder} holds adapters or parts of a model, trained on the base model "
            f"{saved.get('checkpoint')}; model.checkpoint = {base['checkpoint']} has other weights\n"
            "set model.checkpoint to the base model that the checkpoint was trained on"
        )
