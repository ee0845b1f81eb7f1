"""Weights of the engine's models and what an update does to them.

An update is staged: buckets are checked and kept, and everything is written at its end, so that a failure
leaves the old version whole. What fails while it is written leaves neither version: ``torn`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import compress
from typing import TYPE_CHECKING

import torch

from drl.api import Acknowledgement, EngineError, WeightBucket, WeightProof
from drl.mathematics.checksum import (
    FINGERPRINT_BYTES,
    INTEGERS,
    tensors_digest,
    tensors_fingerprint,
)
from drl.mathematics.packing import neighbours
from drl_engine_local.bucket import check_bucket
from drl_engine_local.component import Component, Stage
from drl_engine_local.fitting import check_adapters, check_dense, check_whole

if TYPE_CHECKING:
    from torch import Tensor

PAYLOADS = frozenset({"dense", "lora_merge"})


class WeightStore:
    """The models of an engine, and the update that is being staged.

    ``torn``: an update failed after it had begun to write, and none has succeeded since. ``prints``:
    fingerprint of each model after the last update.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        self.components = dict(components)
        self.stages: dict[str, Stage] = {}
        self.version = 0
        self.torn = False
        self.prints: dict[str, str] = {}

    def begin(self, version: int) -> None:
        """Start an update; one that was not ended is forgotten."""
        self.forget()
        self.version = version

    def forget(self) -> None:
        """Let go of what was staged."""
        self.stages = {}

    @torch.no_grad()
    def stage(self, bucket: WeightBucket) -> Acknowledgement:
        """Check one bucket and keep its tensors; names that the model lacks are reported.

        Adapters are small and kept as copies: their digest holds until the end of the update, whatever
        becomes of the trainer's. Dense weights are kept by reference.
        """
        component = self._component(bucket)
        sent = bucket.carrier.tensors
        if bucket.payload == "lora_merge":
            home = next(iter(component.tensors.values())).device
            sent = tuple(tensor.detach().to(home, copy=True) for tensor in sent)
        check_bucket(bucket, self.version, PAYLOADS, sent)
        known = {name for name in bucket.names if component.knows(name, bucket.payload)}
        stage = self.stages.setdefault(bucket.component, Stage())
        target = stage.dense if bucket.payload == "dense" else stage.adapters
        twice = sorted(known & set(target))
        if twice:
            raise EngineError(f"{bucket.component}: {', '.join(twice)} came twice in one update")
        given = dict(zip(bucket.names, sent, strict=True))
        arrivals = {name: tensor for name, tensor in given.items() if name in known}
        if bucket.payload == "dense":
            check_dense(component, arrivals, bucket.component)
        elif bucket.lora is not None:  # check_bucket made sure of it
            check_adapters(component, arrivals, bucket.lora)
            stage.lora.update(dict.fromkeys(arrivals, bucket.lora))
        target.update(arrivals)
        stage.buckets += 1
        alone = stage.buckets == 1 and len(arrivals) == len(given) == len(stage.adapters)
        stage.digest = bucket.checksum if alone else None
        return Acknowledgement(
            applied=tuple(name for name in bucket.names if name in known),
            unexpected=tuple(name for name in bucket.names if name not in known),
        )

    def _component(self, bucket: WeightBucket) -> Component:
        if bucket.component not in self.components:
            raise EngineError(
                f"engine 'local' has no component {bucket.component!r}; it has "
                f"{', '.join(sorted(self.components))}"
            )
        return self.components[bucket.component]

    @torch.no_grad()
    def apply(self) -> WeightProof:
        """Write everything that was staged; return digests of what is held now.

        Raises EngineError for an update that is not whole and for shared weights that somebody wrote, and
        anything for want of memory: nothing is written then. An error with ``torn`` set came later.
        """
        for name, stage in self.stages.items():
            check_whole(self.components[name], stage, name)
        frozen = {
            name: _frozen(name, one, self.stages.get(name, Stage()))
            for name, one in self.components.items()
        }
        merged = {name: self.components[name].prepare(stage) for name, stage in self.stages.items()}
        self.torn = True
        for name, stage in self.stages.items():
            self.components[name].write(stage, merged.pop(name))
        proof = self._prove(frozen)
        self.torn = False
        self.forget()
        return proof

    def _prove(self, frozen: Mapping[str, str]) -> WeightProof:
        checksums = {name: self._digest(name, stage) for name, stage in self.stages.items()}
        prints = {name: _fingerprint(one, frozen[name]) for name, one in self.components.items()}
        same = (name for name in self.stages if prints[name] == self.prints.get(name))
        unchanged = frozenset(name for name in same if self._is_held(name, self.stages[name]))
        self.prints = prints
        return WeightProof(
            version=self.version,
            checksums=checksums,
            counts={
                name: len(stage.dense) + len(stage.adapters) for name, stage in self.stages.items()
            },
            model_checksums=prints,
            unchanged=unchanged,
        )

    def _is_held(self, name: str, stage: Stage) -> bool:
        """Say whether what the update brought is what the model computes with.

        Asked only of a model that is as it was, where it says that nothing was lost but to rounding. What is
        held as it was sent has been compared already; merged weights are made once more.
        """
        component = self.components[name]
        merged = component.prepare(stage)
        return not unlike(
            list(merged), [component.tensors[key] for key in merged], list(merged.values())
        )

    def _digest(self, name: str, stage: Stage) -> str:
        """Digest what the update brought, once each tensor is held in the engine's own dtype.

        Adapters that are merged are not held by themselves: their update is in the weights.
        """
        component = self.components[name]
        sent = stage.dense | (stage.adapters if component.applied else {})
        held = [
            component.factors[key] if key in component.factors else component.base(key)
            for key in sent
        ]
        lost = unlike(list(sent), held, list(sent.values()))
        if lost:
            raise EngineError(f"{name}: {', '.join(lost)} are not held as they were sent")
        if stage.digest is not None:
            return stage.digest
        brought = {**stage.dense, **stage.adapters}
        return tensors_digest(brought, brought.values())

    def own(self) -> list[Tensor]:
        """Return the tensors whose memory is the engine's, each once."""
        every = (tensor for component in self.components.values() for tensor in component.own())
        return list({id(tensor): tensor for tensor in every}.values())

    def take_rebuilt(self) -> bool:
        """Say whether layers or memory of a model changed since this was last asked."""
        changed = any(component.rebuilt for component in self.components.values())
        for component in self.components.values():
            component.rebuilt = False
        return changed


def _frozen(name: str, component: Component, stage: Stage) -> str:
    """Return the fingerprint of the trainer's tensors that are in use once the update is written.

    Empty where nothing is shared; EngineError when they are not what they were.
    """
    if not component.shared:
        return ""
    theirs = component.theirs(stage.layers())
    frozen = tensors_fingerprint(theirs, theirs.values())
    if component.frozen.setdefault(len(theirs), frozen) != frozen:
        raise EngineError(
            f"{name}: frozen weights that trainer and engine share have changed since the first sync; "
            "nothing may write them. Whoever did has changed the model that is trained too: go on from "
            "the last checkpoint"
        )
    return frozen


def _fingerprint(component: Component, frozen: str) -> str:
    """Return the fingerprint of all that is held, given that of what is shared."""
    theirs = component.theirs()
    own = {key: tensor for key, tensor in component.held().items() if key not in theirs}
    if not component.shared:
        return tensors_fingerprint(own, own.values())
    return sha256((frozen + tensors_fingerprint(own, own.values())).encode()).hexdigest()


def unlike(names: Sequence[str], held: Sequence[Tensor], sent: Sequence[Tensor]) -> list[str]:
    """Return the names whose tensors differ, once what was sent is in the dtype of what is held."""
    pairs = list(zip(held, sent, strict=True))
    # a few kernels and one transfer where nothing differs, however many tensors there are
    flags = [_differ(*map(_joined, zip(*some, strict=True))) for some in _together(pairs)]
    if not any(torch.stack(flags).tolist() if flags else ()):
        return []
    each = torch.stack([_differ(mine, theirs) for mine, theirs in pairs]).tolist()
    return list(compress(names, each))


def _together(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield neighbours of the same dtypes and devices, few enough to take no more than a fingerprint does.

    There are copies of both sides, one of them cast, and a flag for each element.
    """
    return neighbours(
        pairs,
        lambda pair: pair[0].nbytes + pair[1].nbytes,
        FINGERPRINT_BYTES // 2,
        lambda pair: [(one.dtype, one.device) for one in pair],
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _differ(mine: Tensor, theirs: Tensor) -> Tensor:
    """Return a flag on the device. As integers: a NaN that arrived is equal to the one that was sent."""
    kind = INTEGERS[mine.element_size()]
    return torch.ne(mine.view(kind), theirs.to(mine).view(kind)).any()
