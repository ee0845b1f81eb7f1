"""CUDA graphs of whole forwards: one launch instead of thousands, for a host that is slower than its GPU.

A graph is the recording of one guided forward at fixed shapes. It reads latents, time and conditions from
memory of its own, and weights from where the model has them: weights that are written in place are those
of the next replay, weights that move need new graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from drl.api import BadInput, Condition, Conditions, Guidance, Streams

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

GRAPHS = 16
"""Graphs that are recorded at most: a run has one for each size of picture and each guidance."""

WARM_UPS = 3
"""Forwards before the recording: compilers, kernel choices and workspaces must be ready by then."""

Predict = Callable[[str, Streams, "Tensor", Conditions, Guidance], Streams]


@dataclass(slots=True)
class Recording:
    """One graph, the memory that it reads, and the memory that it writes.

    ``filled``: whose values the memory holds now, as long as they are anywhere else.
    """

    graph: torch.cuda.CUDAGraph
    streams: Streams
    time_B: Tensor
    conditions: Conditions
    written: Streams
    filled: ref[Conditions]


class ForwardGraphs:
    """Records a forward at its first call for a component and shapes, and replays it from then on.

    ``recorded``: how many recordings were made so far. BadInput for a device that has no CUDA. Forwards of
    more than ``GRAPHS`` kinds are launched kernel by kernel, which is said once.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BadInput(
                f"rollout.local.cuda_graphs is true, but the engine runs on {device.type}: CUDA graphs "
                "need an NVIDIA GPU; set it to false, or cluster.device to cuda"
            )
        self._device = device
        self._recordings: dict[Hashable, Recording] = {}
        self._pool: Any = None
        self._told = False
        self.recorded = 0

    def predict(
        self,
        plain: Predict,
        component: str,
        streams: Streams,
        time_B: Tensor,
        conditions: Conditions,
        guidance: Guidance,
    ) -> Streams:
        """Return what ``plain`` returns for the same arguments, in memory of its own."""
        read = conditions if guidance.on else Conditions(positive=conditions.positive)
        key = (component, guidance, forms_of(streams), forms_of(arguments_of(read)))
        recording = self._recordings.get(key)
        if recording is None and len(self._recordings) == GRAPHS:
            self._tell()
            return plain(component, streams, time_B, conditions, guidance)
        if recording is None:
            recording = self._record(
                lambda own, own_time_B, known: plain(component, own, own_time_B, known, guidance),
                streams,
                time_B,
                read,
            )
            self._recordings[key] = recording
            self.recorded += 1
        # the step before this one brought those of the same batch
        if recording.filled() is not conditions:
            fill(recording.conditions, read)
            recording.filled = ref(conditions)
        for name, tensor in streams.items():
            recording.streams[name].copy_(tensor)
        recording.time_B.copy_(time_B)
        recording.graph.replay()
        return {name: tensor.clone() for name, tensor in recording.written.items()}

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "rollout.local.cuda_graphs: forwards come in more than %d shapes; graphs are kept of the first "
                "%d, all others are launched kernel by kernel",
                GRAPHS,
                GRAPHS,
            )

    def forget(self) -> None:
        """Drop all graphs and give their memory back: before weights move, and at the end."""
        if not self._recordings:
            return
        torch.cuda.synchronize(self._device)
        while self._recordings:
            self._recordings.popitem()[1].graph.reset()
        self._pool = None
        torch.cuda.empty_cache()

    def _record(
        self,
        predict: Callable[[Streams, Tensor, Conditions], Streams],
        streams: Streams,
        time_B: Tensor,
        conditions: Conditions,
    ) -> Recording:
        own_streams, own_time_B, own = copies_of(streams), time_B.clone(), copied(conditions)
        torch.cuda.synchronize(self._device)
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                predict(own_streams, own_time_B, own)
        torch.cuda.synchronize(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads (rewards, arriving pictures) may go on calling CUDA during the recording
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            written = predict(own_streams, own_time_B, own)
        return Recording(graph, own_streams, own_time_B, own, written, ref(own))


def fill(own: Conditions, given: Conditions) -> None:
    """Copy conditions into those of a graph."""
    values = arguments_of(given)
    for name, memory in arguments_of(own).items():
        if isinstance(memory, torch.Tensor):
            memory.copy_(values[name])


def copied(conditions: Conditions) -> Conditions:
    """Return conditions with memory of their own; beside a joint one the others are empty."""
    if conditions.joint is None:
        negative = conditions.negative
        return Conditions(
            positive=_condition(conditions.positive),
            negative=None if negative is None else _condition(negative),
        )
    empty = Condition(arguments={}, rows=conditions.positive.rows)
    return Conditions(positive=empty, negative=empty, joint=_condition(conditions.joint))


def _condition(condition: Condition) -> Condition:
    return replace(condition, arguments=copies_of(condition.arguments))


def arguments_of(conditions: Conditions) -> dict[str, Any]:
    """Return what a forward reads, by condition and argument: the joint condition alone, where there is one."""
    parts = {"joint": conditions.joint}
    if conditions.joint is None:
        parts = {"positive": conditions.positive, "negative": conditions.negative}
    return {
        f"{part}.{name}": value
        for part, condition in parts.items()
        if condition is not None
        for name, value in condition.arguments.items()
    }


def forms_of(values: Mapping[str, Any]) -> Hashable:
    """Return what a graph is recorded for: names, shapes and dtypes of tensors, and all other values."""
    return tuple(
        (name, tuple(value.shape), value.dtype)
        if isinstance(value, torch.Tensor)
        else (name, repr(value))
        for name, value in values.items()
    )


def copies_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same table with memory of its own for each tensor."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in tensors.items()
    }
