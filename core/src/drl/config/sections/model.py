"""Sections about what is trained and where: run, model, lora, cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from drl.config.fields import (
    DottedPath,
    FunctionName,
    ModuleSpec,
    Names,
    Section,
    init_name,
    pairs,
)
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
    pipeline_config: DottedPath | None = Field(
        None, description="Class of a family that no plugin registers, instead of model.family."
    )
    backend: FunctionName | None = Field(
        None, description="Function that loads a component for training, instead of the family."
    )
    components: Annotated[Names, Field(min_length=1)] = Field(
        ("transformer",), description="Components of the pipeline to train and to sync."
    )
    load: Literal["broadcast", "all_ranks"] = Field(
        "broadcast", description="Ranks that read the weights: the first, which sends them, or all."
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Compute the blocks' activations again in the backward pass instead of keeping them.",
    )
    checkpointed_share: float = Field(
        1.0, gt=0, le=1, description="Share of the blocks that gradient_checkpointing recomputes."
    )


class LoraSection(Section):
    """Adapters instead of full weights; one set of options for all components."""

    enabled: bool = Field(False, description="Train adapters and keep the model's own weights.")
    rank: int = Field(64, gt=0, le=8192, description="Rank of the adapters.")
    r: int | None = Field(None, gt=0, le=8192, description="PEFT's spelling of rank.")
    alpha: float = Field(64.0, gt=0, description="Adapters are scaled by alpha / rank.")
    lora_alpha: float | None = Field(None, gt=0, description="PEFT's spelling of alpha.")
    target_modules: ModuleSpec | None = Field(
        None,
        description="Modules that get an adapter: suffixes of their paths, one regular expression over "
        "the whole path, or all-linear; the family's when unset.",
    )
    lora_modules: ModuleSpec | None = Field(None, description="Another spelling of target_modules.")
    exclude_modules: ModuleSpec | None = Field(
        None, description="Modules that get none although they are targeted; same forms."
    )
    rank_pattern: Annotated[tuple[tuple[str, int], ...], BeforeValidator(pairs)] = Field(
        (),
        description="Ranks of single modules: pairs of a regular expression over the end of the path "
        "and a rank; the first that fits counts.",
    )
    alpha_pattern: Annotated[tuple[tuple[str, float], ...], BeforeValidator(pairs)] = Field(
        (), description="Alphas of single modules, in the same form."
    )
    layers_to_transform: tuple[int, ...] | None = Field(
        None, min_length=1, description="Numbers of the blocks that get adapters; all when unset."
    )
    layers_pattern: Names | None = Field(
        None, description="Name of the list that these numbers count in; any list when unset."
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout on the input of the adapters, while training."
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        "none", description="Biases that train too: all of the model, or those of adapted layers."
    )
    modules_to_save: Names = Field(
        (), description="Suffixes of modules that are trained in full beside the adapters."
    )
    init_weights: Annotated[
        Literal["gaussian", "kaiming-uniform", "random", "orthogonal", "pissa", "olora"],
        BeforeValidator(init_name),
    ] = Field(
        "gaussian",
        description="How the adapters start; random is the only one that changes the model at once.",
    )
    adapter_path: Path | None = Field(
        None,
        description="Start from this PEFT directory; its own rank, alpha and targets are taken.",
    )
    is_trainable: bool = Field(
        True, description="false keeps the adapters as they are; a run then has nothing to train."
    )


class ClusterSection(Section):
    """Where the parts of a run live."""

    launcher: Literal["inline"] = Field(
        "inline",
        description="inline: this process, and one more for each further rank of the trainer.",
        json_schema_extra={"later": ["ray"]},
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N. auto: CUDA where there is a GPU.",
    )
    actor_num_nodes: int = Field(1, gt=0, description="Machines that train; 1 with inline.")
    actor_num_gpus_per_node: int = Field(
        1, gt=0, le=1024, description="Ranks of the trainer on each machine, one per GPU."
    )
    offload: bool = Field(
        False, description="Both offload_train and offload_rollout, where these are unset."
    )
    offload_train: bool | None = Field(
        None, description="Move the trainer to the CPU while the engine samples."
    )
    offload_rollout: bool | None = Field(
        None, description="Let the engine give its memory back while the trainer trains."
    )
    distributed_timeout_minutes: float = Field(
        10.0, gt=0, description="How long ranks wait for each other before the run fails."
    )
