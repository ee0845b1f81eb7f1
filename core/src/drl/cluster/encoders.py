"""Encoder processes: each builds the recipe's encoders and writes what it encodes into the cache itself.

Only the recipe's text and rows travel, never pixels or latents.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drl.cluster.rewards import end_workers
from drl.errors import DrlError
from drl.stages.records import Outcome, RecordEncoder, build_encoder, outcome_of
from drl.trainers import Maker, rank_settings
from drl.types import Context

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.interfaces.family import Family
    from drl.types import Prompt

AHEAD = 2
"""Rows per worker that are handed out before the first is done."""

POLL_S = 0.2
"""How often a wait for the workers looks whether the user asked the run to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What a worker builds its encoders from. ``text``: the resolved recipe, as TOML; ``source``: its file name."""

    text: str
    source: str
    context: Context
    off: tuple[str, ...] = ()


class InlineEncoders:
    """Starts the encoder processes of a run when there is something to encode."""

    def __init__(self, recipe: Any, catalog: Catalog, context: Context) -> None:
        self.recipe = recipe
        self.off = tuple(catalog.plugins.off)
        self.context = context

    def encode(self, prompts: Iterable[Prompt], workers: int) -> Iterator[Outcome]:
        """Yield what became of each row, as ``encode_in_workers``; the trainer's devices are used in turn."""
        settings = rank_settings(self.recipe)
        devices = tuple(settings.device_of(number % settings.world) for number in range(workers))
        spec = EncoderSpec(
            text=self.recipe.to_toml(),
            source=self.recipe.path.name,
            context=self.context,
            off=self.off,
        )
        return encode_in_workers(prompts, spec, devices)


def encode_in_workers(
    prompts: Iterable[Prompt], spec: EncoderSpec, devices: tuple[str, ...]
) -> Iterator[Outcome]:
    """Encode rows in ``len(devices)`` processes and yield what became of them, in the order they finish.

    Yields an empty Outcome when nothing was done for ``POLL_S`` seconds. The processes end with the
    iterator. DrlError when one of them died: what is encoded by then stays.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy locks of other threads
    places = context.SimpleQueue()
    for device in devices:
        places.put(device)
    executor = ProcessPoolExecutor(
        max_workers=len(devices),
        mp_context=context,
        initializer=_start_worker,
        initargs=(spec, places),
    )
    try:
        yield from hand_out(executor, _encode_in_worker, iter(prompts), AHEAD * len(devices))
    except BrokenProcessPool as error:
        raise DrlError(
            f"an encoder worker died or could not start ({error}); what is encoded already is kept\n"
            "start the run again to encode the rest; with fewer data.sft_workers if memory ran out"
        ) from error
    finally:
        end_workers(executor)


def hand_out(
    executor: Executor, work: Callable[[Prompt], Outcome], prompts: Iterator[Prompt], ahead: int
) -> Iterator[Outcome]:
    """Run ``work`` on every prompt, ``ahead`` of them at a time; an empty Outcome marks a pause."""
    running: set[Future[Outcome]] = set()
    left = True
    while left or running:
        while left and len(running) < ahead:
            prompt = next(prompts, None)
            left = prompt is not None
            if prompt is not None:
                running.add(executor.submit(work, prompt))
        done, running = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
        if not done:
            yield Outcome()
        for future in done:
            yield future.result()


_worker: list[RecordEncoder] = []
_place: list[EncoderSpec] = []


def _start_worker(spec: EncoderSpec, places: Any) -> None:
    """Note what this worker process encodes with; it is built with the first row, whose failure is told."""
    import signal

    import torch

    # Ctrl-C is the driver's to handle; it ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, name="drl-watch", daemon=True).start()
    torch.set_num_threads(1)
    _place.append(replace(spec, context=replace(spec.context, device=places.get())))


def encoder_of(spec: EncoderSpec) -> RecordEncoder:
    """Build what a driver's ``build_encoder`` builds, from plain values."""
    from drl.catalog import Catalog
    from drl.config import load_recipe

    catalog = Catalog.load(off=spec.off)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / spec.source
        file.write_text(spec.text)
        recipe: Any = load_recipe(file, catalog=catalog)
    family: Family = Maker(recipe, catalog, spec.context)("family", recipe.model.family, "model")
    return build_encoder(recipe, family, spec.context, catalog)


def _encode_in_worker(prompt: Prompt) -> Outcome:
    if not _worker:
        _worker.append(encoder_of(_place[0]))
    return outcome_of(_worker[0], prompt)


def _end_with_driver() -> None:
    """End this worker when the driver is gone: one that was killed cannot end its workers."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        connection.wait([driver.sentinel])
        os._exit(1)
