"""RewardPool: each term in this process, or in spawned processes that build their own reward.

Only names, options and plain arrays travel to a worker, never classes or tensors.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from drl.errors import BadInput, ContractError, DataError, RewardError
from drl.stages.reward import CUSTOM
from drl.stages.together import together
from drl.types import Context, Media, Prompt, Sample, Score

if TYPE_CHECKING:
    import numpy

    from drl.interfaces.reward import Reward

GRACE_S = 3.0
"""How long a busy worker may finish what it is scoring when the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermSpec:
    """What a worker needs to build a reward: component, options as plain values, context."""

    plugin: str
    options: Mapping[str, Any] | None
    context: Context
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """A sample as it travels to a worker: ``pixels`` (C, F, H, W) float32 array."""

    index: int
    group_index: int
    member: int
    seed: int
    row: int
    epoch: int
    text: str
    metadata: Mapping[str, Any]
    kind: str
    fps: float | None
    pixels: numpy.ndarray[Any, Any] | None


class Term:
    """One reward term: its weight, its reward, and the processes that score for it (if any)."""

    def __init__(self, name: str, weight: float, reward: Reward, spec: TermSpec) -> None:
        self.name = name
        self.weight = weight
        self.reward = reward
        self.spec = spec
        self.executor: ProcessPoolExecutor | None = None

    async def start(self) -> None:
        """Start the reward here, or its worker processes."""
        count = self.reward.workers().processes
        if count == 0:
            await self.reward.start()
            return
        # spawn: a fork would copy locks of this process's threads
        self.executor = ProcessPoolExecutor(
            max_workers=count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self.spec,),
        )
        await self.score([])

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """Score in order; raises RewardError when the worker died, ContractError on a wrong count."""
        if self.executor is None:
            scores = await self.reward.score([light(sample) for sample in samples])
        else:
            packed = [pack(sample) for sample in samples]
            try:
                loop = asyncio.get_running_loop()
                scores = await loop.run_in_executor(self.executor, _score_in_worker, packed)
            except BrokenProcessPool as error:
                raise RewardError(
                    f"reward '{self.name}': its worker process died or could not start ({error})"
                ) from error
        if len(scores) != len(samples):
            raise ContractError(
                f"reward '{self.name}' returned {len(scores)} scores for {len(samples)} samples"
            )
        return scores

    async def close(self) -> None:
        """Free the reward and end its processes."""
        if self.executor is not None:
            executor, self.executor = self.executor, None
            await asyncio.to_thread(end_workers, executor)
        else:
            await self.reward.close()


class InlineRewards:
    """All reward terms of a run.

    ``routes``: terms that score only the samples whose ``metadata.rm_type`` is their name, with weight 1;
    nothing else scores those samples.
    """

    def __init__(self, terms: Sequence[Term], routes: Sequence[Term] = ()) -> None:
        self.terms = tuple(terms)
        self.routes = tuple(routes)
        self.by_name = {term.name: term for term in (*self.routes, *self.terms)}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term, also of those that only some rows ask for."""
        return {term.name: term.weight for term in (*self.terms, *self.routes)}

    def weights_of(self, sample: Sample) -> dict[str, float]:
        """Return the weights of the terms that score a sample."""
        name = row_type(sample.prompt)
        return {term.name: term.weight for term in self.terms} if name is None else {name: 1.0}

    @property
    def wants_groups(self) -> bool:
        """True when a term must see whole groups."""
        return any(term.reward.wants_groups for term in self.by_name.values())

    async def start(self) -> None:
        """Start every term."""
        await together(term.start() for term in self.by_name.values())

    async def score(self, samples: Sequence[Sample]) -> list[dict[str, Score]]:
        """Return the scores of the terms of each sample, in order.

        Raises BadInput for a row that asks for a reward which the run does not have.
        """
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            for name in self.weights_of(sample):
                if name not in self.by_name:
                    raise BadInput(unknown_type(sample.prompt, name, sorted(self.by_name)))
                places.setdefault(name, []).append(place)
        columns = await together(
            self.by_name[name].score([samples[place] for place in of])
            for name, of in places.items()
        )
        rows: list[dict[str, Score]] = [{} for _ in samples]
        for (name, of), column in zip(places.items(), columns, strict=True):
            for place, score in zip(of, column, strict=True):
                rows[place][name] = score
        return rows

    async def check_golden(self) -> None:
        """Raise RewardError when a reward's own good sample does not score above its bad one."""
        for term in self.by_name.values():
            golden = term.reward.golden()
            if golden is None:
                continue
            good, bad = await term.score([golden.good, golden.bad])
            if (
                good.value is None
                or bad.value is None
                or not good.value > bad.value + golden.margin
            ):
                raise RewardError(
                    f"reward '{term.name}' fails its own test: a good sample scores {good.value} "
                    f"({good.failure}), a bad one {bad.value}; reinstall its models and dependencies"
                )

    async def close(self) -> None:
        """Close every term; a second call is harmless."""
        for term in self.by_name.values():
            await term.close()


class FunctionRewards(InlineRewards):
    """Stands where ``reward.custom`` scores: a function of the driver, with nothing to start."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def weights(self) -> dict[str, float]:
        """The one score of the function."""
        return {CUSTOM: 1.0}

    def weights_of(self, sample: Sample) -> dict[str, float]:
        """Return the same for every sample: the function may look at ``metadata.rm_type`` itself."""
        return self.weights


def row_type(prompt: Prompt) -> str | None:
    """Return ``metadata.rm_type``, the reward that a row asks for; DataError when it is no name."""
    found = prompt.metadata.get("rm_type")
    if found is None or (isinstance(found, str) and found):
        return found
    raise DataError(
        f"prompt row {prompt.row}: metadata.rm_type must be the name of a reward, got {found!r}"
    )


def unknown_type(prompt: Prompt, name: str, have: Sequence[str]) -> str:
    """Say that a row asks for a reward that is not there."""
    return (
        f"prompt row {prompt.row}: metadata.rm_type asks for the reward {name!r}; there is "
        f"{', '.join(map(repr, have)) or 'none'}"
    )


def end_workers(executor: ProcessPoolExecutor) -> None:
    """End worker processes; kill those that are still at work after ``GRACE_S`` seconds."""
    workers = list((executor._processes or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        if not connection.wait([worker.sentinel], max(0.0, deadline - time.monotonic())):
            worker.kill()
        worker.join()


def light(sample: Sample) -> Sample:
    """Return a copy with only what a reward may see."""
    return Sample(
        index=sample.index,
        group_index=sample.group_index,
        member=sample.member,
        prompt=sample.prompt,
        seed=sample.seed,
        media=sample.media,
    )


def pack(sample: Sample) -> PackedSample:
    """Turn a sample into plain values for another process."""
    media = sample.media
    return PackedSample(
        index=sample.index,
        group_index=sample.group_index,
        member=sample.member,
        seed=sample.seed,
        row=sample.prompt.row,
        epoch=sample.prompt.epoch,
        text=sample.prompt.text,
        metadata=dict(sample.prompt.metadata),
        kind="image" if media is None else media.kind,
        fps=None if media is None else media.fps,
        pixels=None if media is None else media.pixels.numpy(),
    )


def unpack(packed: PackedSample) -> Sample:
    """The counterpart of ``pack``."""
    import torch

    media = None
    if packed.pixels is not None:
        media = Media(pixels=torch.from_numpy(packed.pixels), kind=packed.kind, fps=packed.fps)
    return Sample(
        index=packed.index,
        group_index=packed.group_index,
        member=packed.member,
        prompt=Prompt(
            row=packed.row, text=packed.text, epoch=packed.epoch, metadata=packed.metadata
        ),
        seed=packed.seed,
        media=media,
    )


_worker: list[tuple[Reward, asyncio.AbstractEventLoop]] = []


def _start_worker(spec: TermSpec) -> None:
    """Build and start the reward of this worker process."""
    import signal

    import torch

    from drl.catalog import Catalog

    # Ctrl-C is the driver's to handle; it ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, name="drl-watch", daemon=True).start()
    torch.set_num_threads(1)
    catalog = Catalog.load(off=spec.off)
    model = catalog.options_model("reward", spec.plugin)
    options = None if model is None else model(**(spec.options or {}))
    reward: Reward = catalog.create("reward", spec.plugin, options, spec.context)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(reward.start())
    _worker.append((reward, loop))


def _end_with_driver() -> None:
    """End this worker when the driver is gone: one that was killed cannot end its workers."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        connection.wait([driver.sentinel])
        os._exit(1)


def _score_in_worker(packed: Sequence[PackedSample]) -> list[Score]:
    reward, loop = _worker[0]
    return list(loop.run_until_complete(reward.score([unpack(item) for item in packed])))
