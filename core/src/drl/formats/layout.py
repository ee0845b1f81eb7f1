"""Layout of a base model: which modules have a weight, and its shape. From headers or a live module.

A pipeline folder is read by its JSON files and safetensors headers alone, so that the layout of a
model of any size costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.errors import BadInput
from drl.formats.headers import TensorFacts, read_header

if TYPE_CHECKING:
    from torch import nn

MODEL_INDEX = "model_index.json"
CONFIG = "config.json"
STEMS = ("diffusion_pytorch_model", "model")
"""File names of weights: diffusers' own models, then those of transformers."""
HUB_FILES = (MODEL_INDEX, "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentLayout:
    """One component: its class, and the shape of the weight by module path ``(out, in, ...)``.

    Only weights that an adapter can be attached to are listed, those of two dimensions or more.
    """

    class_name: str
    weights: Mapping[str, tuple[int, ...]]


Layout = Mapping[str, ComponentLayout]
"""Component layouts by name, as a pipeline names its components."""


def pipeline_layout(folder: Path) -> dict[str, ComponentLayout]:
    """Return the layout of every component of a pipeline folder that has safetensors weights.

    Raises BadInput when the folder is no pipeline.
    """
    read_index(folder)
    return {
        part.name: component_layout(part)
        for part in sorted(folder.iterdir())
        if part.is_dir() and (part / CONFIG).is_file() and weight_files(part)
    }


def component_layout(folder: Path) -> ComponentLayout:
    """Return the layout of one component folder."""
    config = read_object(folder / CONFIG)
    names = config.get("_class_name") or next(iter(config.get("architectures") or ["unknown"]))
    return ComponentLayout(class_name=str(names), weights=_weights(tensor_facts(folder)))


def module_layout(module: nn.Module) -> ComponentLayout:
    """Return the layout of a live module; adapters and wrappers in it are looked through."""
    from drl.lora.naming import MATRICES, to_plain_name

    named = {
        to_plain_name(name): TensorFacts("F32", tuple(parameter.shape))
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not set(MATRICES) & set(name.split("."))
    }
    return ComponentLayout(class_name=type(module).__name__, weights=_weights(named))


def _weights(tensors: Mapping[str, TensorFacts]) -> dict[str, tuple[int, ...]]:
    return {
        name.removesuffix(".weight"): facts.shape
        for name, facts in tensors.items()
        if name.endswith(".weight") and len(facts.shape) > 1
    }


def tensor_facts(folder: Path) -> dict[str, TensorFacts]:
    """Return name and facts of every tensor of a component folder."""
    return {
        name: facts
        for file in weight_files(folder)
        for name, facts in read_header(file).tensors.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a component folder, shards in order; none when it has no weights."""
    for stem in STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            shards = read_object(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(f, str) for f in shards.values()):
                raise BadInput(f"{index} has no weight_map; copy the component again")
            return [folder / Path(name).name for name in sorted(set(shards.values()))]
        if (folder / f"{stem}.safetensors").is_file():
            return [folder / f"{stem}.safetensors"]
    return []


def read_index(folder: Path) -> dict[str, Any]:
    """Return ``model_index.json`` of a pipeline folder; BadInput when there is none."""
    if not (folder / MODEL_INDEX).is_file():
        raise BadInput(
            f"{folder} is no pipeline: it has no {MODEL_INDEX}; give the folder of a whole diffusers "
            "pipeline"
        )
    return read_object(folder / MODEL_INDEX)


def components_of(index: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the components that a pipeline comes with."""
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None:
            yield name


def boundary_ratio(folder: Path) -> float | None:
    """Return where a two-expert pipeline changes models, as a share of the timesteps; None without."""
    value = read_index(folder).get("boundary_ratio")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; BadInput when it is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a JSON {type(value).__name__}; it must be an object")
    return value


def local_pipeline(reference: str, place: str = "with --base") -> Path:
    """Return the folder of a pipeline: the path itself, or the local copy of a hub id.

    ``place``: where the caller takes it, for messages.
    """
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return folder
    advice = f"give the folder of a diffusers pipeline {place}"
    if reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise BadInput(f"there is no folder {reference}; {advice}, or a hub id such as owner/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise BadInput(
            f"there is no folder {reference}, and huggingface_hub, which could download it, is not "
            f"installed; {advice}"
        ) from error
    try:
        return Path(snapshot_download(reference, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:  # every error of the hub client is one of these
        reason = str(error).partition("\n")[0]
        raise BadInput(f"cannot fetch {reference} from the hub: {reason}; {advice}") from error
