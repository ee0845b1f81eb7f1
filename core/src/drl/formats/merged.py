"""A whole pipeline folder with trained weights in it, as ``DiffusionPipeline.from_pretrained`` reads it.

Each changed component is streamed: one shard in memory at a time, every weight merged in float32 from the
base's own file and rounded once. The other components are copied, or linked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drl.errors import BadInput, DrlError
from drl.formats.adapter import (
    Adapter,
    AdapterLayer,
    Layers,
    check_fits,
    embedding_layers,
    merged_weight,
)
from drl.formats.headers import TensorFacts, read_header
from drl.formats.layout import (
    CONFIG,
    MODEL_INDEX,
    STEMS,
    components_of,
    pipeline_layout,
    read_index,
    tensor_facts,
    weight_files,
)
from drl.formats.starts import base_weights
from drl.formats.write import fresh
from drl.lora import to_plain_name
from drl.lora.errors import name_list
from drl.mathematics.checksum import tensors_digest
from drl.observe.files import write_json_atomic

SHARD_BYTES = 10 * 10**9
"""Largest file of weights, as diffusers cuts them."""
EXPORT_FILE = "drl_export.json"
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is new in one component: updates of weights by module path, and whole tensors by name."""

    layers: Layers = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def layer_of(self, name: str) -> AdapterLayer | None:
        """Return the update of the tensor of this name."""
        return self.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None


def changes_of(adapter: Adapter) -> dict[str, Change]:
    """Return what an adapter changes; modules_to_save and biases replace the base's tensors."""
    changes = {}
    for component, layers in adapter.components.items():
        embeddings, rest = embedding_layers(adapter, component)
        tensors = {to_plain_name(key): tensor for key, tensor in rest.items()}
        changes[component] = Change(layers={**layers, **embeddings}, tensors=tensors)
    return changes


def write_pipeline(
    base: Path,
    changes: Mapping[str, Change],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    link: bool = False,
    origin: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write ``base`` with ``changes`` to ``out``, which must not exist. Returns ``out``.

    ``dtype``: of the weights of changed components; None keeps the base's. Tensors that are no weight
    or bias of a module (tables such as SD3's positions) always keep theirs. ``link``: make hard links to
    the base's other files, so that they take no space; without it they are copies. ``origin``: what
    ``drl_export.json`` records. Raises BadInput before anything is written when a change does not fit.
    """
    check_changes(base, changes)
    with fresh(out) as place:
        place.mkdir()
        shutil.copyfile(base / MODEL_INDEX, place / MODEL_INDEX)
        for component in components_of(read_index(base)):
            if component not in changes and (base / component).is_dir():
                copy_folder(base / component, place / component, link=link)
        digests = {
            component: write_component(
                base / component, change, place / component, dtype=dtype, shard_bytes=shard_bytes
            )
            for component, change in changes.items()
        }
        write_json_atomic(place / EXPORT_FILE, {"format": "merged", **(origin or {})})
        for component, digest in digests.items():
            check_written(place / component, digest)
    return out


def check_changes(base: Path, changes: Mapping[str, Change]) -> None:
    """Raise BadInput, naming layers, when changes do not fit the base or its weights cannot be read."""
    layout = pipeline_layout(base)
    for component, change in changes.items():
        if component not in layout:
            raise BadInput(
                f"{base / component} has no safetensors weights ({' or '.join(STEMS)}); merging reads "
                "them. Save the base with safe_serialization=True"
            )
        check_fits(Adapter(components={component: change.layers}), layout, "the adapter")
        facts = tensor_facts(base / component)
        lost = sorted(set(change.tensors) - set(facts))
        wrong = [
            f"{name}: {list(tensor.shape)}, the base has {list(facts[name].shape)}"
            for name, tensor in change.tensors.items()
            if name in facts and tuple(tensor.shape) != facts[name].shape
        ]
        if lost or wrong:
            raise BadInput(
                f"the trained tensors do not fit {base / component}: not there {name_list(lost) or 'none'}; "
                f"of another shape {name_list(wrong) or 'none'}"
            )


def write_component(
    source: Path, change: Change, target: Path, *, dtype: torch.dtype | None, shard_bytes: int
) -> dict[str, str]:
    """Write one changed component; returns the digest of the tensors of each file."""
    copy_folder(source, target, link=False, weights=False)
    facts = tensor_facts(source)
    kinds = {
        name: target_dtype(
            name, one, dtype, changes=name in change.tensors or change.layer_of(name) is not None
        )
        for name, one in facts.items()
    }
    sizes = {name: size_of(one, kinds[name]) for name, one in facts.items()}
    shards = plan_shards(sizes, shard_bytes)
    stem = next(stem for stem in STEMS if weight_files(source)[0].name.startswith(stem))
    digests = {}
    where: dict[str, str] = {}
    with base_weights(source) as held:
        for number, names in enumerate(shards, start=1):
            ending = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file_name = f"{stem}{ending}.safetensors"
            tensors = {
                name: changed_tensor(name, held[name], change, kinds[name]) for name in names
            }
            save_file(tensors, target / file_name, metadata={"format": "pt"})
            digests[file_name] = tensors_digest(tensors, tensors.values())
            where |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(where.items())),
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (target / f"{stem}.safetensors.index.json").write_text(text, "utf-8")
    return digests


def target_dtype(
    name: str, facts: TensorFacts, wanted: torch.dtype | None, *, changes: bool
) -> torch.dtype | None:
    """Return the dtype to write a tensor in, None for the one it has.

    BadInput for a tensor that changes but is no plain float: quantised weights cannot be merged.
    """
    if facts.dtype not in FLOATS:
        if changes:
            raise BadInput(
                f"{name} of the base is {facts.dtype}; merging needs float32, bfloat16 or float16 weights"
            )
        return None
    belongs = name.endswith((".weight", ".bias"))
    return wanted if wanted is not None and belongs else FLOATS[facts.dtype]


def changed_tensor(name: str, tensor: Tensor, change: Change, dtype: torch.dtype | None) -> Tensor:
    """Return what becomes of one tensor of the base."""
    layer = change.layer_of(name)
    held = change.tensors.get(name, tensor)
    if dtype is None:
        return held.contiguous()
    done = held.to(dtype) if layer is None else merged_weight(held, layer, dtype)
    return done.contiguous()


def size_of(facts: TensorFacts, dtype: torch.dtype | None) -> int:
    """Return the bytes of a tensor once it is written."""
    return facts.bytes if dtype is None else prod(facts.shape) * dtype.itemsize


def plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cut names into files of at most ``limit`` bytes, in order; a larger tensor gets its own file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def copy_folder(source: Path, target: Path, *, link: bool, weights: bool = True) -> None:
    """Copy a component folder; ``weights`` false leaves out every file of weights."""
    target.mkdir(parents=True)
    for file in _files(source):
        if not weights and _is_weights(file):
            continue
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if link:
            os.link(file.resolve(), place)
        else:
            shutil.copyfile(file, place)


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".msgpack", ".h5") or file.name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def check_written(folder: Path, digests: Mapping[str, str]) -> None:
    """Read weights again and raise DrlError unless every tensor is the one that was written."""
    if not (folder / CONFIG).is_file():
        raise DrlError(f"{folder} was written without its {CONFIG}")
    for name, digest in digests.items():
        header = read_header(folder / name)
        with safe_open(folder / name, framework="pt") as file:
            names = list(header.tensors)
            held = {one: file.get_tensor(one) for one in names}
        if not _same(held, digest):
            raise DrlError(
                f"{folder / name} came back different from what was written; write again"
            )


def _same(held: Mapping[str, Tensor], digest: str) -> bool:
    return tensors_digest(held, held.values()) == digest
