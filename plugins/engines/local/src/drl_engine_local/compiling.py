"""Compiled blocks of the engine's models; the row count is fixed, so each kind of block needs one graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drl.api import Launch, TrainPipelineConfig
from drl.model.compiled import Compilations, compile_blocks

if TYPE_CHECKING:
    from torch import nn

LABEL = "engine"


def compile_models(
    launch: Launch, models: Mapping[str, nn.Module], backend: str = "inductor"
) -> Compilations:
    """Compile the blocks that the family names, in place; BadInput for a model without any of them.

    The graphs are made by the first batches: one set per number of rows, picture size and text length. An
    evaluation at another size has graphs of its own, which are no fault. ``backend``: a compiler that torch
    knows.
    """
    log = Compilations(LABEL, backend)
    for name, model in models.items():
        compile_blocks(model, component_config(launch, name).wrap, log)
    return log


def component_config(launch: Launch, name: str) -> TrainPipelineConfig:
    """Return what the family says of a component of the checkpoint."""
    config = launch.family.component_config(name, launch.checkpoint)
    return launch.family.pipeline_config(name, config)
