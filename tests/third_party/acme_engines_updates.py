"""Engines that do not do what they should with new weights; each wraps the local engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from drl.api import Acknowledgement, LocalTensors
from drl.mathematics.checksum import tensors_digest
from drl_engine_local.engine import LocalEngine


def rebuilt(bucket, tensors):
    """Return the bucket with other tensors by name, labelled right."""
    return replace(
        bucket,
        names=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        checksum=tensors_digest(list(tensors), list(tensors.values())),
        carrier=LocalTensors(tensors=tuple(tensors.values())),
    )


class Deaf(LocalEngine):
    """Acknowledges every tensor and goes on with the model that it has."""

    async def begin_update(self, version):
        self.names, self.tensors = [], []
        await super().begin_update(version)

    async def update_weights(self, bucket):
        self.names += bucket.names
        self.tensors += bucket.carrier.tensors
        return Acknowledgement(applied=bucket.names)

    async def end_update(self, version):
        proof = await super().end_update(version)
        digest = tensors_digest(self.names, self.tensors)
        counts = {"transformer": len(self.names)}
        return replace(proof, checksums={"transformer": digest}, counts=counts)


class Renaming(LocalEngine):
    """Knows the same layers by other names."""

    async def update_weights(self, bucket):
        own = self.store.components["transformer"].tensors
        layers = sorted(name for name in own if name.endswith("weight") and "attn" in name)
        return Acknowledgement(
            applied=(),
            missing=tuple(f"model.diffusion_model.{name}" for name in layers),
            unexpected=bucket.names,
        )


class Editing(LocalEngine):
    """Changes the weights on their way in."""

    async def update_weights(self, bucket):
        tensors = dict(zip(bucket.names, bucket.carrier.tensors, strict=True))
        answer = await super().update_weights(rebuilt(bucket, self.edit(tensors)))
        return replace(answer, applied=bucket.names)


class Dropping(Editing):
    def edit(self, tensors):
        tensors.pop(sorted(tensors)[0])
        return tensors


class Adding(Editing):
    def edit(self, tensors):
        return tensors | {"time_text_embed.extra.lora_A": torch.zeros(4, 4)}


def a_matrix(tensors):
    return min(name for name, tensor in tensors.items() if tensor.ndim == 2)


class Reshaping(Editing):
    def edit(self, tensors):
        name = a_matrix(tensors)
        return tensors | {name: tensors[name][:, :-1].contiguous()}


class Damaging(Editing):
    """Flips the sign of one number."""

    def edit(self, tensors):
        name = a_matrix(tensors)
        damaged = tensors[name].clone()
        damaged[0, 0] *= -1
        return tensors | {name: damaged}


class Counting(LocalEngine):
    """Can prove how many tensors came, and no more."""

    def capabilities(self):
        return replace(super().capabilities(), proof="counts")
