"""Buckets from packed units, handed to the clients of engines in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from drl.api import (
    EngineClient,
    EngineHandle,
    LocalTensors,
    PackedUnits,
    PushReport,
    SyncError,
    WeightBucket,
)
from drl.mathematics.checksum import tensors_digest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Sender:
    """Clients of the connected engines; ``payload`` is that of the buckets ("dense", "lora_merge")."""

    payload: str
    clients: tuple[EngineClient, ...] = ()

    def connect(self, engines: Sequence[EngineHandle]) -> None:
        """Open a client of each engine; SyncError names one that lives elsewhere."""
        try:
            self.clients = tuple(engine.open() for engine in engines)
        except KeyError as error:
            raise SyncError(
                f"engine {error.args[0]!r} does not live in this process; pick another sync.updater"
            ) from error

    def close(self) -> None:
        """Let go of the clients."""
        self.clients = ()

    def push(self, component: str, packs: Iterator[PackedUnits], version: int) -> PushReport:
        """Send every pack to every engine; the iterator is drained even when sending fails.

        Making a pack is collective work when weights are sharded: a rank that stopped early would
        leave the others waiting.
        """
        if not self.clients:
            raise SyncError("no engine is connected; call connect before push")
        start = perf_counter()
        sent = Sent()
        try:
            for index, pack in enumerate(packs):
                self._send(sent, self._bucket(component, pack, version, index))
        finally:
            for _ in packs:
                pass
        return PushReport(
            version=version,
            component=component,
            names=tuple(sent.names),
            buckets=sent.buckets,
            bytes=sum(tensor.nbytes for tensor in sent.tensors),
            checksum=sent.checksum(),
            missing=tuple(sorted(sent.missing)),
            unexpected=tuple(sorted(sent.unexpected)),
            seconds=perf_counter() - start,
        )

    def _bucket(self, component: str, pack: PackedUnits, version: int, index: int) -> WeightBucket:
        tensors = tuple(tensor.detach() for tensor in pack.tensors)
        return WeightBucket(
            component=component,
            version=version,
            index=index,
            payload=self.payload,
            names=pack.names,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
            checksum=tensors_digest(pack.names, tensors),
            carrier=LocalTensors(tensors=tensors),
            lora=pack.lora if self.payload == "lora_merge" else None,
        )

    def _send(self, sent: Sent, bucket: WeightBucket) -> None:
        for client in self.clients:
            answer = client.update_weights(bucket)
            sent.missing.update(answer.missing)
            sent.unexpected.update(answer.unexpected)
        sent.names.extend(bucket.names)
        sent.tensors.extend(bucket.carrier.tensors)
        sent.digests.append(bucket.checksum)
        sent.buckets += 1


@dataclass
class Sent:
    """What a push has sent so far, and what the engines answered."""

    names: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    buckets: int = 0
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)

    def checksum(self) -> str:
        """Return the digest of everything; that of the only bucket was computed when it was packed."""
        if len(self.digests) == 1:
            return self.digests[0]
        return tensors_digest(self.names, self.tensors)


def drained(component: str, packs: Iterator[PackedUnits], version: int) -> PushReport:
    """Draw every pack and send none: sharded weights are gathered by all ranks together."""
    start = perf_counter()
    names = tuple(name for pack in packs for name in pack.names)
    return PushReport(
        version=version,
        component=component,
        names=names,
        buckets=0,
        bytes=0,
        checksum="",
        seconds=perf_counter() - start,
    )
