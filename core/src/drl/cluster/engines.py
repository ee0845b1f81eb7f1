"""EnginePool for one engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from drl.cluster.background import Background
from drl.interfaces.engine import (
    CLIENTS,
    Acknowledgement,
    Engine,
    EngineClient,
    EngineHandle,
    Launch,
    Memory,
    WeightBucket,
    WeightProof,
)
from drl.types import RolloutRequest, Sample


@dataclass(frozen=True, slots=True)
class InlineClient(EngineClient):
    """Blocking calls to an engine on the background loop."""

    engine: Engine
    background: Background

    def begin_update(self, version: int) -> None:
        """Stop new requests, wait for running ones."""
        self.background.run(self.engine.begin_update(version))

    def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        """Hand over one bucket."""
        return self.background.run(self.engine.update_weights(bucket))

    def end_update(self, version: int) -> WeightProof:
        """Let the engine prove and serve the new version."""
        return self.background.run(self.engine.end_update(version))


class InlineEngines:
    """One embedded engine. It lives and dies with this process, so nothing is ever recovered.

    ``concurrency``: requests in flight at most; those beyond it wait here, first come, first served.
    """

    def __init__(
        self, name: str, engine: Engine, background: Background, concurrency: int = 512
    ) -> None:
        self.name = name
        self.engine = engine
        self.background = background
        self.slots = asyncio.Semaphore(concurrency)
        self.handle: EngineHandle | None = None

    def start(self, launch: Launch) -> None:
        """Start the engine and make it reachable by its handle."""
        info = self.background.run(self.engine.start(launch))
        CLIENTS[info.address] = InlineClient(self.engine, self.background)
        self.handle = EngineHandle(
            component=self.name,
            address=info.address,
            capabilities=self.engine.capabilities(),
            ranks=info.ranks,
            gpu_uuids=info.gpu_uuids,
        )

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        """Make one microgroup, as soon as one of the engine's slots is free."""
        async with self.slots:
            return await self.engine.generate(request)

    async def recover(self) -> Sequence[EngineHandle]:
        """Return no new engines."""
        await asyncio.sleep(0)
        return ()

    def handles(self) -> Sequence[EngineHandle]:
        """Return the handle of the engine."""
        return () if self.handle is None else (self.handle,)

    def begin_update(self, version: int) -> None:
        """Tell the engine that weights will come."""
        for handle in self.handles():
            handle.open().begin_update(version)

    def end_update(self, version: int) -> list[WeightProof]:
        """Return what the engine holds now."""
        return [handle.open().end_update(version) for handle in self.handles()]

    def release(self, what: Memory) -> None:
        """Let the engine give memory back, once running requests are done."""
        self.background.run(self.engine.release(what))

    def resume(self, what: Memory) -> None:
        """Let the engine take its memory again."""
        self.background.run(self.engine.resume(what))

    def close(self) -> None:
        """Stop the engine; a second call is harmless."""
        if self.handle is not None:
            CLIENTS.pop(self.handle.address, None)
            self.background.run(self.engine.stop())
            self.handle = None
