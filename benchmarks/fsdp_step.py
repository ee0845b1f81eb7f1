"""One optimizer step under FSDP2, in many ways, against the unwrapped step; and where the time goes.

``python benchmarks/fsdp_step.py`` prints milliseconds by phase and kernels by kind, medians of one run.
``--out`` keeps the profiler's 20 largest entries of each variant. ``--world 2`` starts two processes.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from common import SCALES, Row, arguments, free, report, write
from fsdp_profile import KINDS, profiled
from fsdp_variants import VARIANTS, Step, Variant
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drl.model.parallel import loopback_only


def main() -> None:
    """Start a process per rank, or measure in this one."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--world", type=int, default=1, help="ranks, each a process and a GPU")
    parser.add_argument("--only", default="", help="variants whose names match this expression")
    parser.add_argument("--no-profile", action="store_true", help="times alone")
    parser.add_argument("--profile-all", action="store_true", help="profile every variant")
    parser.set_defaults(repeats=7, warmup=1)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        meeting = Path(folder) / "ranks"
        if options.world == 1:
            rank_main(0, options, meeting)
        else:
            torch.multiprocessing.spawn(  # type: ignore[no-untyped-call]
                rank_main, (options, meeting), nprocs=options.world
            )


def rank_main(rank: int, options: argparse.Namespace, meeting: Path) -> None:
    """Join the group, measure every variant, and report on rank 0."""
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(meeting), options.world)
    backend = "nccl" if cuda else "gloo"
    with loopback_only():
        dist.init_process_group(backend, store=store, rank=rank, world_size=options.world)
        try:
            mesh = init_device_mesh(options.device.partition(":")[0], (options.world,))
            chosen = [variant for variant in VARIANTS if re.search(options.only, variant.name)]
            rows = measured(chosen, options, mesh)
        finally:
            dist.destroy_process_group()
    if rank == 0:
        report(f"fsdp_step_{options.world}", options, rows, columns=columns_of(rows))


def measured(
    variants: Sequence[Variant], options: argparse.Namespace, mesh: DeviceMesh
) -> list[Row]:
    """Return a row per variant; what torch refuses is a row that says so.

    Adapters first, then full weights. The variants of one kind take turns, step by step, because the
    speed of a host drifts by more than what they differ in; ratios are medians over turns.
    """
    rows: list[Row] = []
    for kind in dict.fromkeys(variant.kind for variant in variants):
        steps, refused = prepared([v for v in variants if v.kind == kind], options, mesh)
        rows += refused + timed(steps, options)
        keep(rows, options)
        if not options.no_profile:
            profile_steps(steps, rows, options)
            keep(rows, options)
        steps.clear()
        free()
    return rows


def prepared(
    variants: Sequence[Variant], options: argparse.Namespace, mesh: DeviceMesh
) -> tuple[dict[str, Step], list[Row]]:
    """Build and warm up every variant; return the steps, and rows of those that torch refused."""
    steps: dict[str, Step] = {}
    refused: list[Row] = []
    for variant in variants:
        try:
            step = Step(variant, SCALES[options.size], options.device, mesh)
            step()
            step.first_norm = (
                step.gradient_norm()
            )  # later ones follow weights that part by rounding
            for _ in range(options.warmup):
                step()
            steps[variant.name] = step
        except Exception as error:
            # in one process the others keep their figures; ranks would wait for each other
            if options.world > 1:
                raise
            print(f"{variant.name}:", file=sys.stderr)
            traceback.print_exc()
            refused.append(
                {"variant": variant.name, "refused": f"{type(error).__name__}: {error}"[:160]}
            )
    return steps, refused


def timed(steps: dict[str, Step], options: argparse.Namespace) -> list[Row]:
    """Let the steps take turns; return medians of their phases and of their ratio to the first."""
    turns: list[dict[str, dict[str, float]]] = []
    for _ in range(options.repeats):
        turns.append({name: phase_times(step, options.device) for name, step in steps.items()})
    first = next(iter(steps), "")
    rows: list[Row] = []
    for name, step in steps.items():
        times = [turn[name] for turn in turns]
        ratio = median(sum_of(turn[name]) / sum_of(turn[first]) for turn in turns)
        row: Row = {"variant": name, "step ms": median(map(sum_of, times)), "ratio": ratio}
        row |= {f"{phase} ms": median(each[phase] for each in times) for phase in times[0]}
        rows.append(row | {"gradient": step.first_norm})
    return rows


def profile_steps(steps: dict[str, Step], rows: list[Row], options: argparse.Namespace) -> None:
    """Add where the device's time goes to the rows of steps that are to be profiled."""
    for row in rows:
        step = steps.get(row["variant"])
        if step is None or not (step.variant.profile or options.profile_all):
            continue
        profile = profiled(step, options.device)
        if profile.busy:
            row |= {"busy": profile.busy, "idle": profile.idle, **profile.kinds}
        if options.out is not None and dist.get_rank() == 0:
            with (options.out / f"fsdp_step_{options.world}_profile.txt").open("a") as file:
                file.write(f"== {row['variant']}\n{profile.text}\n")


def phase_times(step: Step, device: str) -> dict[str, float]:
    """Return milliseconds by phase, and those that the host took to launch them all.

    A host that takes as long as the whole step is what the device waits for.
    """
    if not device.startswith("cuda"):
        marks = [time.perf_counter()]
        for _, phase in step.phases():
            phase()
            marks.append(time.perf_counter())
        times = [(end - start) * 1e3 for start, end in pairwise(marks)]
        return names_of(step, times) | {"host": sum(times)}
    began = time.perf_counter()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(step.phases()) + 1)]
    events[0].record()
    for (_, phase), event in zip(step.phases(), events[1:], strict=True):
        phase()
        event.record()
    host = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in pairwise(events)]
    return names_of(step, times) | {"host": host}


def names_of(step: Step, times: Sequence[float]) -> dict[str, float]:
    """Return the times by phase."""
    return {name: took for (name, _), took in zip(step.phases(), times, strict=True)}


def sum_of(times: dict[str, float]) -> float:
    """Return the whole step's time."""
    return sum(took for name, took in times.items() if name != "host")


def columns_of(rows: Sequence[Row]) -> list[list[str]]:
    """Return the columns of two tables: phases of the step, and kinds of kernels."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    kernels = [name for name in names if name in ("busy", "idle", *KINDS, "other")]
    times = [name for name in names if name not in (*kernels, "refused")]
    tables = [times, ["variant", *kernels] if kernels else [], ["variant", "refused"]]
    return [table for table in tables if len(table) > 1 and any(table[1] in row for row in rows)]


def keep(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write what is known so far: a run that is stopped keeps the figures of its finished variants."""
    if options.out is not None and dist.get_rank() == 0:
        write(f"fsdp_step_{options.world}", options, rows)


if __name__ == "__main__":
    main()
