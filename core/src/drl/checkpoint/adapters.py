"""The trained adapter beside the checkpoints: written from a snapshot, then read back and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from drl.errors import CheckpointError
from drl.lora import AdapterSnapshot, read_peft, write_peft
from drl.lora.naming import PEFT_PREFIX
from drl.lora.peft_directory import DIFFUSERS_FILE
from drl.lora.peft_tensors import WEIGHTS_FILE


def write_adapters(
    snapshots: Mapping[str, AdapterSnapshot], root: Path, *, base_model: str
) -> list[Path]:
    """Write one adapter per component and load each; several components get a folder each.

    Raises CheckpointError when what was written is not what was trained.
    """
    folders = []
    for component, snapshot in snapshots.items():
        folder = root / component if len(snapshots) > 1 else root
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_peft(snapshot, folder, base_model=base_model, component=component)
        check_adapter(folder, snapshot, component)
        folders.append(folder)
    return folders


def check_adapter(folder: Path, snapshot: AdapterSnapshot, component: str) -> None:
    """Read an adapter as its users will: the bits of PEFT's file, tensors and strength of diffusers'.

    diffusers takes the strength from the header alone, and without it runs every adapter at scale 1.
    """
    for file, prefix in ((WEIGHTS_FILE, PEFT_PREFIX), (DIFFUSERS_FILE, f"{component}.")):
        problem = problem_of(folder / file, snapshot, prefix)
        if problem:
            raise CheckpointError(
                f"{folder / file} is not the adapter that was trained: {problem}; check the disk it is on"
            )
    problem = diffusers_problem(folder / DIFFUSERS_FILE, snapshot, component)
    if not snapshot.config.needs_base:  # such a one is read only beside its base weights
        read_peft(folder)
    if problem:
        raise CheckpointError(f"{folder / DIFFUSERS_FILE} would not load as trained: {problem}")


def problem_of(file: Path, snapshot: AdapterSnapshot, prefix: str) -> str | None:
    """Return which tensor of a file is not the snapshot's to the bit, or None."""
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        return f"it cannot be read ({error})"
    wanted = {prefix + key: tensor for key, tensor in snapshot.tensors.items()}
    for key in sorted(state.keys() | wanted.keys()):
        if key not in state or key not in wanted:
            return f"{key} is {'missing' if key in wanted else 'not part of it'}"
        if state[key].dtype != wanted[key].dtype or not torch.equal(state[key], wanted[key]):
            return f"{key} differs when read back"
    return None


def diffusers_problem(file: Path, snapshot: AdapterSnapshot, component: str) -> str | None:
    """Return what of a diffusers file is not the snapshot's, or None."""
    try:
        with safe_open(file, framework="pt") as stream:
            described = json.loads((stream.metadata() or {})["lora_adapter_metadata"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    prefix = f"{component}."
    config = snapshot.config
    found = {key: described.get(prefix + key) for key in ("r", "lora_alpha")}
    if found != {"r": config.rank, "lora_alpha": config.alpha}:
        return (
            f"its header says {found}, the adapter has rank {config.rank} and alpha {config.alpha}"
        )
    return None
