"""The trainer's loop on a GPU: nothing in it waits for the device, uploads arrive whole, memory is bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_loss import CONTEXT, LOSSES, forward_of, shard_of
from gpu.facts import record
from gpu.runs import no_waiting, open_run, roll_out
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from drl.api import Shard
from drl.mathematics.gaussian import row_mean
from drl.mathematics.transfer import columns, stacked
from drl.run import Run
from drl.stages.step import accumulate, result_of, start_clipping

pytestmark = pytest.mark.gpu

CPU = DeviceType.CPU
GUIDED = ("sampling.guidance_scale=4.5", "algorithm.kl_beta=0.04")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits; cudaMemcpyAsync and its kind are none of them."""


def window_of(shard: Shard, device: str) -> Shard:
    """Return the shard with every tensor of its pairs on the device, as the local engine leaves them."""
    window = [
        tuple(
            replace(pair, tensors={name: x.to(device) for name, x in pair.tensors.items()})
            for pair in pairs
        )
        for pairs in shard.windows[0]
    ]
    return replace(shard, windows=[window])


@pytest.mark.parametrize("home", ["cpu", "device"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_waits_in_its_loop(device: str, name: str, home: str) -> None:
    """The first window warms up: kernels load, and the first use of a library may wait."""
    loss = LOSSES[name]()
    shard = shard_of(loss)
    here = shard if home == "cpu" else window_of(shard, device)
    forward = forward_of(loss, device, batched=True)
    found = []
    for _ in range(2):
        forward.models["transformer"].zero_grad(set_to_none=True)
        result_of(here.windows[0], accumulate(forward, here.windows[0], 1.0, CONTEXT))
    forward.models["transformer"].zero_grad(set_to_none=True)
    with no_waiting(device):
        totals = accumulate(forward, here.windows[0], shard.window_weights[0], CONTEXT)
        verdict = start_clipping(forward.models["transformer"].named_parameters(), 1e9)
    found.append(result_of(here.windows[0], totals))
    on_cpu = forward_of(loss, batched=True)
    totals = accumulate(on_cpu, shard.windows[0], shard.window_weights[0], CONTEXT)
    found.append(result_of(shard.windows[0], totals))
    assert found[0].broken is None
    assert found[0].figures.sums == pytest.approx(found[1].figures.sums, rel=1e-3, abs=1e-4)
    norm, _ = verdict()
    expected, _ = start_clipping(on_cpu.models["transformer"].named_parameters(), 1e9)()
    assert norm == pytest.approx(expected, rel=1e-3)


def windows(run: Run) -> Shard:
    """Return one rollout's shard, trained on once: whatever is made at first use is there."""
    _, (shard,) = roll_out(run)
    list(run.trainer.train([shard]))
    return shard


def test_the_products_loop_waits_for_nothing(
    device: str, bf16: tuple[str, ...], recipe: Path, tmp_path: Path
) -> None:
    """Flow-GRPO with guidance and a KL term, on the tiny model: forward, reference, loss, backward, metrics."""
    with open_run(recipe, tmp_path / "run", *bf16, *GUIDED) as run:
        shard = windows(run)
        trainer = run.trainer
        with no_waiting(device):
            totals = accumulate(
                trainer.forward, shard.windows[0], shard.window_weights[0], trainer.context
            )
        assert result_of(shard.windows[0], totals).broken is None
        if device.startswith("cuda"):
            assert waits_of(run, shard) == Counter()


def waits_of(run: Run, shard: Shard) -> Counter[str]:
    """Return by the profiler how often the host waited, and what came back, while a window was launched."""
    torch.cuda.synchronize()
    with (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen,
        record_function("loop"),
    ):
        accumulate(run.trainer.forward, shard.windows[0], 1.0, run.trainer.context)
    events = list(seen.events())
    loop = next(e.time_range for e in events if e.name == "loop" and e.device_type == CPU)
    # the profiler itself waits for the device once the loop is over
    inside = Counter(e.name for e in events if loop.start <= e.time_range.start < loop.end)
    kernels = sum(n for name, n in inside.items() if name.startswith("cudaLaunchKernel"))
    assert kernels, "the profiler saw no launch: it would see no wait either"
    record("training_loop", launches_per_micro_batch=round(kernels / len(shard.windows[0])))
    return Counter({name: n for name, n in inside.items() if waits(name)})


def waits(name: str) -> bool:
    """True for an event in which the host waits, or gets numbers from the device."""
    return name in WAITS or "DtoH" in name or name == "aten::item"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_joined_guidance_keeps_rollout_and_trainer_equal(
    request: pytest.FixtureRequest, precision: str, recipe: Path, tmp_path: Path
) -> None:
    """Both sides make one forward of twice the rows, so before the first step nothing differs."""
    sets = (*request.getfixturevalue(precision), "sampling.guidance_scale=4.5")
    with open_run(recipe, tmp_path / "run", *sets, "sampling.batched_guidance=true") as run:
        _, shards = roll_out(run)
        report = run.trainer.replay(shards)
        assert run.trainer.forward.batched_guidance
    record("parity", **{f"joined guidance, {precision}": report.worst})
    assert report.worst == 0.0
    assert set(report.mean_by_step.values()) == {0.0}


def test_the_mean_of_a_row_has_the_same_bits_in_any_batch(device: str) -> None:
    values = torch.randn(16, 16, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    together = row_mean(values)
    for count in range(1, 17):
        assert torch.equal(row_mean(values[:count]), together[:count]), count


def test_uploads_that_nobody_waits_for_arrive_whole(device: str) -> None:
    """Page-locked memory is used again at once: a copy must have left it before the next one fills it."""
    where = torch.device(device)
    rows = [torch.full((64, 1024), float(number)) for number in range(64)]
    busy = torch.randn(2048, 2048, device=device)
    arrived = []
    for _ in range(8):
        for _ in range(4):
            busy = busy @ busy / 2048  # work that copies are queued behind
        arrived += [stacked(rows[first : first + 8], where) for first in range(0, 64, 8)]
        arrived += [torch.stack(columns([[float(n)] * 9 for n in range(3)], where))]
    for number, tensor in enumerate(arrived):
        place = number % 9
        expected = [0.0, 1.0, 2.0] if place == 8 else [8.0 * place + row for row in range(8)]
        assert tensor.flatten(1).mean(1).tolist() == expected, number


def test_memory_does_not_grow_with_the_window(device: str) -> None:
    """However many micro-batches: one or two are on the device at a time."""
    if not device.startswith("cuda"):
        pytest.skip("the CPU's allocator keeps no peak")
    loss = LOSSES["policy_loss"]()
    shard = shard_of(loss, 64)
    forward = forward_of(loss, device)
    peaks = []
    for count in (4, 4, 64):
        torch.cuda.reset_peak_memory_stats()
        accumulate(forward, shard.windows[0][:count], 1.0, CONTEXT).read()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(shard.windows[0]) == 64
    assert peaks[2] < peaks[1] + 2**20
