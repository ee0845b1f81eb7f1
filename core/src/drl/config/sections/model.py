"""Sections about what is trained and where: run, model, lora, cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from drl.config.fields import Names, Section
from drl.options import Field


class RunSection(Section):
    """What the run is called and where it is kept."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="Name of the run; the recipe's file name when unset.",
    )
    directory: str = Field(
        "runs", min_length=1, description="Folder that the run directory is made in."
    )


class ModelSection(Section):
    """The pipeline that is trained and served."""

    checkpoint: str = Field(
        min_length=1, description="A diffusers pipeline: a local folder or a hub id."
    )
    family: str | None = Field(
        None,
        min_length=1,
        description="Model family; when unset, the family that claims the checkpoint.",
    )
    components: Annotated[Names, Field(min_length=1)] = Field(
        ("transformer",), description="Components of the pipeline to train and to sync."
    )


class LoraSection(Section):
    """Adapters instead of full weights; one set of options for all components."""

    enabled: bool = Field(False, description="Train adapters and keep the model's own weights.")
    rank: int = Field(64, gt=0, le=8192, description="Rank of the adapters.")
    alpha: float = Field(64.0, gt=0, description="Adapters are scaled by alpha / rank.")
    target_modules: Annotated[Names, Field(min_length=1)] | None = Field(
        None, description="Suffixes of the modules that get an adapter; the family's when unset."
    )
    init_weights: Literal["gaussian", "kaiming-uniform"] = Field(
        "gaussian", description="How the first adapter matrix starts; the second starts at 0."
    )


class ClusterSection(Section):
    """Where the parts of a run live."""

    launcher: Literal["inline"] = Field(
        "inline",
        description="inline: everything in this process.",
        json_schema_extra={"later": ["ray"]},
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$",
        description="auto, cpu, cuda or cuda:N. auto: CUDA where there is a GPU.",
    )
