"""Whole weights of components that may be sharded, written to files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from drl.lora import adapter_names, to_plain_name
from drl.lora.sharding import full_tensor
from drl.model.parallel import ALONE, Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def write_weights(
    models: Mapping[str, nn.Module], folder: Path, ranks: Ranks = ALONE
) -> list[Path]:
    """Write ``NAME.safetensors`` of every component without adapters; collective, rank 0 writes.

    One tensor after the other is gathered and moved to the CPU. Returns the files.
    """
    written = []
    for name, model in models.items():
        if adapter_names(model):
            continue
        tensors = {}
        for key, value in model.state_dict().items():
            whole = full_tensor(value)  # every rank takes part
            if ranks.rank == 0:
                tensors[to_plain_name(key)] = whole.cpu().contiguous()
        file = folder / f"{name}.safetensors"
        if ranks.rank == 0:
            folder.mkdir(exist_ok=True)
            save_file(tensors, file)
        written.append(file)
    return written
