"""Engine ``local``: denoises in the trainer's process, with its own copy of the weights.

All work on the models, sampling and updates alike, runs in one thread, so the event loop stays free
and an update never meets a running forward. A batch takes whatever waits, whoever asked for it; its
row count never changes, so neither does a sample.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from drl.api import (
    Acknowledgement,
    BadInput,
    Context,
    Engine,
    EngineCapabilities,
    EngineDead,
    EngineError,
    EngineInfo,
    Launch,
    RolloutRequest,
    Sample,
    Sampling,
    WeightBucket,
    WeightProof,
    WeightSource,
)
from drl_engine_local.sampler import Sampler
from drl_engine_local.schedule import Row, check_request
from drl_engine_local.waiting import Job, WaitingRows
from drl_engine_local.weights import PAYLOADS, WeightStore

Result = TypeVar("Result")
MATRIX_BLOCK = 4


class LocalEngine(Engine):
    """The embedded engine. ``generate`` may be called by any number of tasks on any event loop."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.version = 0
        self.launch: Launch | None = None
        self.sampler: Sampler | None = None
        self.store: WeightStore | None = None
        self.waiting = WaitingRows(options.rows, options.wait_ms / 1000)
        self.thread: ThreadPoolExecutor | None = None
        self.lock = Lock()
        self.gate: Future[None] | None = None

    def capabilities(self) -> EngineCapabilities:
        """Return what it can do; the SDE types are those that it was launched with."""
        kinds = self.launch.sde_backends if self.launch is not None else ("sde", "cps", "ode")
        return EngineCapabilities(
            transports=frozenset({"local"}),
            payloads=PAYLOADS,
            can_mix_payloads=True,
            proof="checksum",
            transactional=True,
            echoes=frozenset(Sampling.__dataclass_fields__),
            sde_types=frozenset(kinds),
            partial_trajectory=True,
            path_seeds=True,
            debug_tensors=True,
            batch_invariant=self._rows_are_alike(),
        )

    def _rows_are_alike(self) -> bool:
        """Say whether every row of a batch is computed by the same instructions.

        With several threads MKL multiplies rows in blocks of 4 and the rest by another kernel, whose last
        bits differ: of 6 rows, 4 and 5 would depend on their place.
        """
        rows: int = self.options.rows
        return rows <= MATRIX_BLOCK or rows % MATRIX_BLOCK == 0

    async def start(self, launch: Launch) -> EngineInfo:
        """Load the model; two engines of one process never share weights."""
        if self.thread is not None:
            raise EngineError("engine 'local' was started already; make another one")
        if len(launch.family.streams) != 1:
            raise BadInput(
                f"engine 'local' samples models with one stream; this one has "
                f"{', '.join(launch.family.streams)}"
            )
        self.launch = launch
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drl-engine-local")
        await self._run(self._load)
        return EngineInfo(address=f"local://{os.getpid()}/{id(self)}", pids=(os.getpid(),))

    def _load(self) -> None:
        launch = self._launched()
        models = {}
        dtype = "fp32" if self.options.weights == "fp32" else launch.dtype
        for name in launch.components:
            source = WeightSource(checkpoint=launch.checkpoint, dtype=dtype, device=launch.device)
            models[name] = launch.family.build(name, source).eval().requires_grad_(False)
        context = Context(device=launch.device, dtype=launch.dtype, seed=self.context.seed)
        pipeline = launch.family.pipeline(launch.checkpoint, context)
        if pipeline is None:
            raise BadInput("rollout.engine: this model family has no embedded sampler for 'local'")
        self.store = WeightStore(models)
        self.sampler = Sampler(
            family=launch.family,
            pipeline=pipeline,
            models=models,
            backends=launch.sde_backends,
            count=self.options.rows,
            device=launch.device,
            dtype=launch.dtype,
        )

    async def health(self, timeout_s: float) -> None:
        """Return when the engine is started and was not stopped."""
        if self.thread is None or self.sampler is None:
            raise EngineDead("engine 'local' is not running; start it first")

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        """Make one microgroup, in the order of its seeds; waits while weights are being updated."""
        check_request(request, self._launched().sde_backends)
        jobs = [Job(Row(request, place)) for place in range(len(request.seeds))]
        futures = await self._enqueue(jobs)
        try:
            return [await asyncio.wrap_future(future) for future in futures]
        finally:
            self.waiting.remove(jobs)
            for future in futures:  # after a failure or a cancel: the rest is no longer wanted
                future.cancel()

    async def _enqueue(self, jobs: list[Job]) -> list[Future[Sample]]:
        while True:
            with self.lock:
                gate = self.gate
                if gate is None:
                    self.waiting.add(jobs)
                    return [self._submit(partial(self._finish, job)) for job in jobs]
            await asyncio.shield(asyncio.wrap_future(gate))

    def _finish(self, job: Job) -> Sample:
        """Return the sample of a job, made now or by an earlier batch that had room for it.

        A batch that fails fails here, for this job alone; the others of the batch still wait, and
        their own turn shows whether it was their fault.
        """
        sampler = self.sampler
        if sampler is None:
            raise EngineDead("engine 'local' was stopped before this sample was made")
        if job.sample is None:
            batch = self.waiting.batch_with(job)
            samples = sampler.make([other.row for other in batch], version=self.version)
            for other, sample in zip(batch, samples, strict=True):
                other.sample = sample
        assert job.sample is not None
        return job.sample

    async def begin_update(self, version: int) -> None:
        """Close the door to new requests and wait until those inside are done."""
        store = self._store()
        with self.lock:
            if self.gate is None:
                self.gate = Future()
        await self._run(time.monotonic)  # the thread is a queue: its turn comes after all samples
        store.begin(version)

    async def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        """Check and keep one bucket; nothing is written before the end of the update.

        After an EngineError the update is over: the engine serves its old version again.
        """
        store = self._updating()
        return await self._run_or_reopen(lambda: store.stage(bucket))

    async def end_update(self, version: int) -> WeightProof:
        """Write what was staged, all or nothing, and serve as ``version``."""
        store = self._updating()
        if version != store.version:
            self._reopen()
            raise EngineError(f"update {store.version} cannot be ended as version {version}")
        proof = await self._run_or_reopen(store.apply)
        self.version = version
        self._reopen()
        return proof

    async def stop(self) -> None:
        """Let running work end and free the models; a second call is harmless."""
        thread, self.thread = self.thread, None
        self._reopen()
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)
        self.sampler = self.store = self.launch = None

    def _launched(self) -> Launch:
        if self.launch is None:
            raise EngineDead("engine 'local' is not running; start it first")
        return self.launch

    def _store(self) -> WeightStore:
        if self.store is None:
            raise EngineDead("engine 'local' is not running; start it first")
        return self.store

    def _updating(self) -> WeightStore:
        store = self._store()
        if self.gate is None:
            raise EngineError("engine 'local' has no update in progress; call begin_update first")
        return store

    def _reopen(self) -> None:
        with self.lock:
            gate, self.gate = self.gate, None
        if gate is not None:
            gate.set_result(None)

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self.thread is None:
            raise EngineDead("engine 'local' is not running; start it first")
        return self.thread.submit(work)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._submit(work))

    async def _run_or_reopen(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._run(work)
        except EngineError:
            self._reopen()
            raise
