"""The micro-batch loop never asks the device for a number: operators that would wait for it are counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from every_loss import CONTEXT, LOSSES, Mixing, forward_of, shard_of
from torch.utils._python_dispatch import TorchDispatchMode

from drl.api import Shard
from drl.stages.parity import log_probs
from drl.stages.step import accumulate, measure, result_of, start_clipping

WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "item")
"""Operators whose result, or its shape, the host needs: on a GPU it waits for all work before them."""


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name without namespace and overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waiting(self) -> dict[str, int]:
        return {name: self.counts[name] for name in WAITING if self.counts[name]}


@pytest.fixture(params=LOSSES)
def prepared(request: pytest.FixtureRequest) -> tuple[Any, Shard]:
    loss = LOSSES[request.param]()
    return loss, shard_of(loss)


def test_the_counter_sees_what_waits() -> None:
    number = torch.tensor(1.0)
    with Operators() as seen:
        number.item()
        bool(number > 0)
        torch.equal(number, number)
        number.reshape(1)[torch.tensor([True])]
    assert seen.waiting == {"_local_scalar_dense": 2, "equal": 1}
    assert seen.counts["index"] == 1


@pytest.mark.parametrize("batched", [False, True], ids=["two forwards", "one forward"])
def test_no_loss_waits_in_its_loop(prepared: tuple[Any, Shard], batched: bool) -> None:
    loss, shard = prepared
    forward = forward_of(loss, batched=batched)
    with Operators() as seen:
        totals = accumulate(forward, shard.windows[0], shard.window_weights[0], CONTEXT)
    assert seen.waiting == {}
    assert len(shard.windows[0]) > 1
    figures, losses = totals.read()
    assert len(losses) == len(shard.windows[0])
    assert figures.counts["loss"] == shard.window_weights[0]


def test_what_a_window_tells_leaves_at_once(prepared: tuple[Any, Shard]) -> None:
    """However many micro-batches and metrics: the figures of a window are one tensor when they are read."""
    loss, shard = prepared
    forward = forward_of(loss)
    totals = accumulate(forward, shard.windows[0], shard.window_weights[0], CONTEXT)
    with Operators() as seen:
        totals.read()
    assert set(seen.counts) <= {"cat", "detach", "_to_copy", "alias"}
    assert seen.counts["cat"] == 1


def test_a_micro_batch_costs_one_operator_for_all_its_metrics(prepared: tuple[Any, Shard]) -> None:
    """Adding up happens on the host: a window of twice the micro-batches has twice the stacks, no more."""
    loss, shard = prepared
    counts = []
    for window in (shard.windows[0], [*shard.windows[0], *shard.windows[0]]):
        forward = forward_of(loss)
        with Operators() as seen:
            accumulate(forward, window, 1.0, CONTEXT)
        counts.append(sum(seen.counts.values()) / len(window))
    assert counts[1] == pytest.approx(counts[0], rel=0.05)


def test_a_step_waits_once_for_its_norm() -> None:
    loss = LOSSES["policy_loss"]()
    shard = shard_of(loss)
    forward = forward_of(loss)
    accumulate(forward, shard.windows[0], shard.window_weights[0], CONTEXT)
    named = list(forward.models["transformer"].named_parameters())
    with Operators() as seen:
        verdict = start_clipping(named, 1e-3)
    assert seen.waiting == {}
    with Operators() as seen:
        norm, broken = verdict()
    assert seen.waiting == {"_local_scalar_dense": 1}
    assert broken is None
    assert norm > 1e-3


def test_the_replay_and_the_measuring_pass_wait_for_nothing_between_micro_batches() -> None:
    loss = LOSSES["policy_loss"]()
    shard = shard_of(loss, 8)
    forward = forward_of(loss)
    batches = [(pairs, CONTEXT) for pairs in shard.windows[0]]
    with Operators() as seen:
        scores = log_probs(forward, batches)
        measure(forward, shard.windows[0], CONTEXT)
    assert seen.waiting == {}
    assert len(scores) == sum(len(pairs) for pairs in shard.windows[0])


def test_joined_guidance_doubles_the_rows_and_keeps_the_gradient(
    prepared: tuple[Any, Shard],
) -> None:
    """One forward of 2B rows where there were two of B; figures and gradients agree within rounding."""
    loss, shard = prepared
    found = []
    for batched in (False, True):
        forward = forward_of(loss, batched=batched)
        window = shard.windows[0]
        totals = accumulate(forward, window, shard.window_weights[0], CONTEXT)
        result = result_of(window, totals)
        model = forward.models["transformer"]
        assert isinstance(model, Mixing)
        assert model.matrix.grad is not None
        found.append((result.figures, model.matrix.grad, model.rows))
    (plain, gradient, rows), (joined, gradient_joined, rows_joined) = found
    assert sum(rows) == sum(rows_joined)
    guided = len(rows) != len(rows_joined)
    assert guided == ("guidance" in {need.value for need in loss.needs})
    assert not guided or 2 * len(rows_joined) == len(rows)
    torch.testing.assert_close(gradient_joined, gradient, rtol=1e-4, atol=1e-6)
    for name, total in plain.sums.items():
        assert joined.sums[name] == pytest.approx(total, rel=1e-4, abs=1e-5), name


def test_conditions_of_a_group_go_up_once() -> None:
    """All steps of a sample share its record."""
    loss = LOSSES["policy_loss"]()
    shard = shard_of(loss)
    forward = replace(forward_of(loss), device=torch.device("meta"))
    first = shard.windows[0][0]
    records = {id(pair.condition) for pair in first}
    moved = [forward.records.on_device(pair.condition) for pair in first if pair.condition]
    assert len({id(record) for record in moved}) == len(records) == 1
    assert all(record.tensors["text"].is_meta for record in moved)
