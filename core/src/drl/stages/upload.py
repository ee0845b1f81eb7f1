"""Pairs on their way to the training device: a micro-batch of tensors, and its conditions.

A micro-batch goes up right before its forward. Its copies are queued behind the kernels of the one before
it, so the host runs ahead and the device holds one or two micro-batches, however long the window is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drl.errors import BatchError
from drl.mathematics.transfer import columns, is_on, moved, stacked
from drl.types import ConditionRecord, Pair, PairBatch

RECORDS_LIMIT = 512 * 2**20
"""Bytes of condition records that stay on the device: some hundred prompts of a large text encoder."""


class Columns(dict[str, Tensor]):
    """Tensors of a batch by name; one that is not there is named in a BatchError."""

    def __missing__(self, name: str) -> Tensor:
        raise not_there(name, self)


def not_there(name: str, known: Iterable[str]) -> BatchError:
    """Return the error for a name that pairs lack."""
    return BatchError(
        f"the loss reads {name!r} of its pairs, which have {sorted(known)}; a function that makes pairs "
        "(rollout.custom_expand, rollout.custom_convert) must set what the loss reads"
    )


def make_batch(pairs: Sequence[Pair], device: torch.device) -> PairBatch:
    """Stack pairs on the device; raises BatchError when they do not fit into one batch."""
    components = sorted({pair.component for pair in pairs})
    if len(components) > 1:
        raise BatchError(
            f"a micro-batch mixes denoising phases {components}; set train.micro_batch_size = 1, or "
            "choose trained steps of one phase (sde.step_strategy)"
        )
    first = pairs[0]
    timesteps = [pair.timestep for pair in pairs if pair.timestep is not None]
    timed = len(timesteps) == len(pairs)
    scalars = [
        [pair.weight for pair in pairs],
        [pair.sigma for pair in pairs],
        *([pair.values[name] for pair in pairs] for name in first.values),
        *([timesteps] if timed else []),
    ]
    weight_B, sigma_B, *others = columns(scalars, device)
    return PairBatch(
        pairs=tuple(pairs),
        tensors=Columns(
            (key, stacked([pair.tensors[key] for pair in pairs], device)) for key in first.tensors
        ),
        values=Columns(zip(first.values, others, strict=False)),
        weight_B=weight_B,
        sigma_B=sigma_B,
        timestep_B=others[-1] if timed else None,
    )


class Records:
    """Condition records on the device, each moved once: the samples of a group share one.

    Keeps at most ``limit`` bytes, of those used last. On the CPU, and for a record that is on the device
    already, there is nothing to keep.
    """

    def __init__(self, device: torch.device, limit: int = RECORDS_LIMIT) -> None:
        self.device = device
        self.limit = limit
        self.held = 0
        # the record itself is kept too: its id is its name for as long as it lives
        self._moved: OrderedDict[int, tuple[ConditionRecord, ConditionRecord]] = OrderedDict()

    def on_device(self, record: ConditionRecord) -> ConditionRecord:
        """Return the record with its tensors on the device; the host does not wait."""
        if all(is_on(tensor, self.device) for tensor in record.tensors.values()):
            return record
        found = self._moved.get(id(record))
        if found is not None:
            self._moved.move_to_end(id(record))
            return found[1]
        tensors = {name: moved(tensor, self.device) for name, tensor in record.tensors.items()}
        there = replace(record, tensors=tensors)
        self._moved[id(record)] = record, there
        self.held += size_of(there)
        while self.held > self.limit and len(self._moved) > 1:
            _, (_, oldest) = self._moved.popitem(last=False)
            self.held -= size_of(oldest)
        return there

    def clear(self) -> None:
        """Give the memory back."""
        self._moved.clear()
        self.held = 0


def size_of(record: ConditionRecord) -> int:
    """Return the bytes of a record's tensors."""
    return sum(tensor.nbytes for tensor in record.tensors.values())
