"""Engine ``local``: denoises in the trainer's process, on the trainer's own weights or on a copy.

All work on the models, sampling and updates alike, runs in one thread, so the event loop stays free
and an update never meets a running forward. A batch takes whatever waits, whoever asked for it; its
row count never changes, so neither does a sample.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

from drl.api import (
    Acknowledgement,
    BadInput,
    Context,
    Engine,
    EngineCapabilities,
    EngineDead,
    EngineError,
    EngineInfo,
    EngineOutline,
    Launch,
    Memory,
    RolloutRequest,
    Sample,
    Sampling,
    WeightBucket,
    WeightProof,
)
from drl.mathematics.feeding import Feeding
from drl.model.compiled import Compilations
from drl.model.moving import move, release_cached
from drl_engine_local.compiling import compile_models, component_config
from drl_engine_local.graphs import ForwardGraphs
from drl_engine_local.loading import check_options, load_components, may_share
from drl_engine_local.sampler import NEGATIVE_PROMPT, Sampler
from drl_engine_local.schedule import Row, check_request
from drl_engine_local.waiting import Finishing, Job, WaitingRows
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
        self.finishing = Finishing()
        self.waiting = self._queue()
        self.thread: ThreadPoolExecutor | None = None
        self.lock = Lock()
        self.gate: Future[None] | None = None
        self.released: set[Memory] = set()
        self.compilations: Compilations | None = None

    def capabilities(self) -> EngineCapabilities:
        """Return what it can do; the SDE types are those that it was launched with, none before."""
        kinds = self.launch.sde_backends if self.launch is not None else ()
        return EngineCapabilities(
            transports=frozenset({"local"}),
            payloads=frozenset({"lora_merge"}) if self.store and self._shares() else PAYLOADS,
            can_mix_payloads=True,
            proof="checksum",
            transactional=True,
            echoes=frozenset(Sampling.__dataclass_fields__),
            sde_types=frozenset(kinds),
            partial_trajectory=True,
            path_seeds=True,
            debug_tensors=True,
            batch_invariant=self._rows_are_alike(),
            sleeps=True,
            shares_weights=self._shares(),
        )

    def _shares(self) -> bool:
        """Say whether it computes with the trainer's weights; before the start, whether it would."""
        if self.store is None:
            return may_share(self.options)
        return any(component.shared for component in self.store.components.values())

    def outline(self) -> EngineOutline:
        """Return how many rows it computes, and on whose weights."""
        return EngineOutline(
            rows=self.options.rows,
            weights=self.options.weights,
            adapters=self.options.adapters,
            compiled=self.options.compile,
            weights_option="rollout.local.weights",
            graphs_option="rollout.local.cuda_graphs" if self.options.cuda_graphs else None,
            rows_option="rollout.local.rows",
        )

    def counts(self) -> Mapping[str, float]:
        """Return rows and padding so far, and graphs: recorded, compiled, compiled without need."""
        figures: dict[str, float] = {}
        if self.sampler is not None:
            figures |= self.sampler.counts()
        if self.compilations is not None:
            figures["compiled_graphs"] = float(self.compilations.graphs)
            figures["recompilations"] = float(self.compilations.unexpected)
        return figures

    def _rows_are_alike(self) -> bool:
        """Say whether every row of a batch is computed by the same instructions.

        With several threads MKL multiplies rows in blocks of 4 and the rest by another kernel, whose last
        bits differ: of 6 rows, 4 and 5 would depend on their place.
        """
        rows: int = self.options.rows
        return rows <= MATRIX_BLOCK or rows % MATRIX_BLOCK == 0

    def _queue(self) -> WaitingRows:
        return WaitingRows(self.options.rows, self.options.wait_ms / 1000, self._busy)

    async def start(self, launch: Launch) -> EngineInfo:
        """Load the model, as version 0; two engines of one process never share weights.

        Raises EngineError when it was started already, BadInput for a model or options that it cannot serve.
        """
        if self.thread is not None:
            raise EngineError("engine 'local' was started already; make another one")
        if len(launch.family.streams) != 1:
            raise BadInput(
                f"engine 'local' samples models with one stream; this one has "
                f"{', '.join(launch.family.streams)}"
            )
        self.launch = launch
        self.version = 0
        self.finishing = Finishing()
        self.waiting = self._queue()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drl-engine-local")
        await self._run(self._load)
        return EngineInfo(address=f"local://{os.getpid()}/{id(self)}", pids=(os.getpid(),))

    def _load(self) -> None:
        launch = self._launched()
        graphs = self._graphs(launch.device)
        check_options(launch, self.options)
        context = Context(device=launch.device, dtype=launch.dtype, seed=self.context.seed)
        pipeline = launch.family.pipeline(launch.checkpoint, context)
        if pipeline is None:
            raise BadInput("rollout.engine: this model family has no embedded sampler for 'local'")
        # before weights take the room of encoders that leave
        pipeline.expect((*launch.prompts, NEGATIVE_PROMPT))
        components = load_components(launch, self.options)
        models = {name: component.model for name, component in components.items()}
        if self.options.compile:
            self.compilations = compile_models(launch, models)
        self.store = WeightStore(components)
        self.sampler = Sampler(
            family=launch.family,
            pipeline=pipeline,
            models=models,
            backends=launch.sde_backends,
            count=self.options.rows,
            device=launch.device,
            dtype=launch.dtype,
            batched_guidance=launch.batched_guidance,
            feeding={name: Feeding.of(component_config(launch, name)) for name in models},
            graphs=graphs,
        )

    def _graphs(self, device: str) -> ForwardGraphs | None:
        return ForwardGraphs(torch.device(device)) if self.options.cuda_graphs else None

    async def health(self, timeout_s: float) -> None:
        """Return when the engine is started and was not stopped."""
        if self.thread is None or self.sampler is None:
            raise EngineDead("engine 'local' is not running; start it first")

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        """Make one microgroup, in the order of its seeds; waits while weights are being updated."""
        check_request(request, self._launched().sde_backends)
        jobs = [Job(Row(request, place)) for place in range(len(request.seeds))]
        turns: list[Future[None]] = []
        try:
            await self._enqueue(jobs, turns)
            return [await asyncio.wrap_future(job.done) for job in jobs]
        finally:
            self.waiting.remove(jobs)
            for turn in turns:  # after a failure or a cancel: the rest is no longer wanted
                turn.cancel()

    async def _enqueue(self, jobs: list[Job], turns: list[Future[None]]) -> None:
        while True:
            with self.lock:
                gate = self.gate
                if gate is None:
                    self.waiting.add(jobs)
                    # one by one: when the engine stops meanwhile, the caller cancels those there are
                    turns.extend(self._submit(partial(self._turn, job)) for job in jobs)
                    break
            await asyncio.shield(asyncio.wrap_future(gate))
        for job, turn in zip(jobs, turns, strict=True):
            turn.add_done_callback(job.turned)

    def _turn(self, job: Job) -> None:
        """Launch the batch of a job, unless an earlier batch had room for it.

        A batch that cannot be launched fails for this job alone; the others of the batch still wait, and
        their own turn shows whether it was their fault.
        """
        try:
            sampler = self._ready()
            if job.waits:
                self._launch(sampler, self.waiting.batch_with(job))
        except BaseException as error:
            job.fail(error)  # at once: the batch of the next turn must not take it again
            raise

    def _ready(self) -> Sampler:
        if self.sampler is None:
            raise EngineDead("engine 'local' was stopped before this sample was made")
        if self.released:
            raise EngineError("engine 'local' gave its memory back; resume it before it samples")
        if self._store().torn:
            raise EngineError(
                "engine 'local' holds neither the old weights nor the new ones: an update failed while it "
                "was written; push again before it samples"
            )
        return self.sampler

    def _launch(self, sampler: Sampler, batch: list[Job]) -> None:
        try:
            launched = sampler.launch([job.row for job in batch], version=self.version)
        except BadInput:
            if len(batch) == 1:
                raise
            batch = batch[:1]  # alone it fails only if the bad row is its own
            launched = sampler.launch([batch[0].row], version=self.version)
        for job in batch:
            job.launched = True
        self.finishing.take(launched, batch)

    def _busy(self) -> bool:
        return self.finishing.busy()

    async def begin_update(self, version: int) -> None:
        """Close the door to new requests and wait until those inside are done."""
        store = self._store()
        if Memory.WEIGHTS in self.released:
            raise EngineError("engine 'local' gave its weights' memory back; resume them first")
        with self.lock:
            if self.gate is None:
                self.gate = Future()
        # a queue: its turn comes after all samples
        await self._run_or_reopen(self.finishing.settle)
        store.begin(version)

    async def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        """Check and keep one bucket; nothing is written before the end of the update.

        After an error of any kind the update is over: the engine serves its old version again.
        """
        store = self._updating()
        return await self._run_or_reopen(lambda: store.stage(bucket))

    async def end_update(self, version: int) -> WeightProof:
        """Write what was staged, and serve as ``version``.

        After an error the update is over. It serves its old version again, or nothing until the next update
        where the error came when weights were written already.
        """
        self._updating()
        proof = await self._run_or_reopen(partial(self._apply, version))
        self._reopen()
        return proof

    def _apply(self, version: int) -> WeightProof:
        store = self._store()
        if version != store.version:
            raise EngineError(f"update {store.version} cannot be ended as version {version}")
        try:
            proof = store.apply()
            self.version = version  # here: whoever ends the update may be cancelled meanwhile
        finally:
            if store.take_rebuilt():
                self._forget_graphs()
        return proof

    async def release(self, what: Memory) -> None:
        """Give memory back once running samples are done: weights of its own, or all that surrounds them.

        Weights go to the CPU; those that are the trainer's are not the engine's to release. REST: text
        encoders, VAE, recorded graphs. Until ``resume`` it makes no samples.
        """
        self._store()
        await self._run(partial(self._release, what))

    def _release(self, what: Memory) -> None:
        if what in self.released:
            return
        self.finishing.settle()
        sampler = self.sampler
        self._forget_graphs()
        if what is Memory.WEIGHTS:
            move(self._store().own(), "cpu")
        elif sampler is not None:
            sampler.pipeline.release()
        self.released.add(what)
        release_cached(self._launched().device)

    async def resume(self, what: Memory) -> None:
        """Take memory again; the parts around the weights come back when they are next used."""
        self._store()
        await self._run(partial(self._resume, what))

    def _resume(self, what: Memory) -> None:
        if what in self.released and what is Memory.WEIGHTS:
            move(self._store().own(), self._launched().device)
        self.released.discard(what)

    def _forget_graphs(self) -> None:
        if self.sampler is not None and self.sampler.graphs is not None:
            self.sampler.graphs.forget()

    async def stop(self) -> None:
        """Let running work end and free the models; a second call is harmless."""
        thread, self.thread = self.thread, None
        self._reopen()
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)
            await asyncio.to_thread(self._finish)
        self.sampler = self.store = self.launch = None
        self.released.clear()

    def _finish(self) -> None:
        self.finishing.stop()
        self._forget_graphs()

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
        except BaseException:  # out of memory or cancelled too: a closed gate is never noticed
            with suppress(EngineDead):
                self._submit(self._store().forget)  # behind work that still runs
            self._reopen()
            raise
