"""Checkpoints: the training state on disk, whole or absent, read without running what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drl.checkpoint.folders import checkpoints_in, latest
from drl.checkpoint.manifest import damage
from drl.checkpoint.meta import read_meta

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["checkpoints_in", "damage", "latest", "read_meta", "read_weights"]


def read_weights(folder: Path, *, trust: bool = False) -> dict[str, Tensor]:
    """Return the trained parameters of a checkpoint folder by ``component.parameter``.

    Whole tensors on the CPU in the stored dtypes, whatever number of ranks wrote them; needs no process
    group. Raises CheckpointError for a folder that is no checkpoint of drl, or damaged. ``trust`` runs
    metadata that names more than a checkpoint's classes.
    """
    from drl.checkpoint.dcp import read_whole

    read_meta(folder)
    return read_whole(folder / "model", trust=trust)
