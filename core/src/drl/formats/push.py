"""An adapter into a running engine, layer by layer, without a second copy of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drl.cluster.engines import InlineEngines
from drl.errors import SyncError
from drl.formats.adapter import Adapter, Layers, embedding_layers, merged_weight
from drl.formats.starts import base_weights
from drl.interfaces.engine import LocalTensors, LoraFields, WeightBucket
from drl.lora import to_plain_name
from drl.mathematics.checksum import tensors_digest

VERSION = 1


def push_adapter(adapter: Adapter, engines: InlineEngines, base: Path) -> None:
    """Give an adapter to every engine, and prove that each took all of it; SyncError otherwise.

    Linear layers travel as adapters, one bucket per rank and alpha; convolutions and embeddings merged,
    other trained tensors as they are. ``base``: the pipeline folder that the engine runs.
    """
    engines.begin_update(VERSION)
    sent: dict[str, int] = {}
    for component in adapter.components:
        for index, bucket in enumerate(buckets_of(adapter, component, base)):
            sent[component] = sent.get(component, 0) + len(bucket.names)
            for handle in engines.handles():
                answer = handle.open().update_weights(replace(bucket, index=index))
                if answer.unexpected or answer.missing:
                    raise SyncError(
                        f"{component}: the engine does not know {sorted(answer.unexpected)[:4]}"
                    )
    for proof in engines.end_update(VERSION):
        if dict(proof.counts) != sent:
            raise SyncError(f"sent {sent} tensors of the adapter, the engine wrote {proof.counts}")


def buckets_of(adapter: Adapter, component: str, base: Path) -> Iterator[WeightBucket]:
    """Yield what an engine must be told to run one component with its adapter."""
    layers = adapter.components[component]
    groups: dict[tuple[int, float], dict[str, Tensor]] = defaultdict(dict)
    for path, layer in layers.items():
        if layer.A.dim() == 2:
            group = groups[layer.rank, layer.alpha]
            group[f"{path}.lora_A"], group[f"{path}.lora_B"] = layer.A, layer.B
    for (rank, alpha), tensors in groups.items():
        yield _bucket(component, "lora_merge", tensors, LoraFields(rank=rank, alpha=alpha))
    dense = dict(_dense(adapter, component, layers, base))
    if dense:
        yield _bucket(component, "dense", dense, None)


def _dense(
    adapter: Adapter, component: str, layers: Layers, base: Path
) -> Iterator[tuple[str, Tensor]]:
    embeddings, rest = embedding_layers(adapter, component)
    for key, tensor in rest.items():
        yield to_plain_name(key), tensor
    others = {path: layer for path, layer in layers.items() if layer.A.dim() > 2}
    others |= embeddings
    if others:
        with base_weights(base / component) as weights:
            for path, layer in others.items():
                name = f"{path}.weight"
                yield name, merged_weight(weights[name], layer, torch.float32)


def _bucket(
    component: str, payload: str, tensors: Mapping[str, Tensor], lora: LoraFields | None
) -> WeightBucket:
    values = tuple(tensors.values())
    return WeightBucket(
        component=component,
        version=VERSION,
        index=0,
        payload=payload,
        names=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in values),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in values),
        checksum=tensors_digest(tensors, values),
        carrier=LocalTensors(tensors=values),
        lora=lora,
    )
