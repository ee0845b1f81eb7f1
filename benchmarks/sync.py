"""What a weight push of adapters costs beside the model, and what sleeping frees: on one device.

``python benchmarks/sync.py`` opens a run per way in which the engine can hold its weights, gives the
adapters other values before each push, and pushes them through the run's own ``sync``, proof included;
"collector" is the longest pause of Python's garbage collector meanwhile (a loop sets its objects aside).
Its parts are timed by themselves too: the digest of what is sent (made twice a push, by sender and engine),
the merge, and the fingerprint of the whole model. Then trainer and engine leave the device and return.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from common import GIB, MEDIUM, SCALES, SMALL, Row, arguments, free, report
from common import sync as wait_for
from gpu.pipelines import write_pipeline
from gpu.runs import open_run

from drl.interfaces.engine import LoraFields, Memory
from drl.lora import adapters
from drl.mathematics.checksum import tensors_digest, tensors_fingerprint
from drl.run import Run
from drl.stages.sync import lora_fields, sync
from drl_engine_local.component import Component, Stage

SIZES = {"medium": MEDIUM, "small": SMALL}
WAYS = {
    "shared, merged": ("shared", "merged"),
    "shared, applied": ("shared", "applied"),
    "bf16 copy, merged": ("forward", "merged"),
    "fp32 copy, merged": ("fp32", "merged"),
}
RECIPE = """
[model]
checkpoint = "{checkpoint}"

[lora]
enabled = true
rank = {rank}
alpha = 64

[cluster]
device = "{device}"

[data]
prompt_data = "{prompts}"

[sampling]
num_steps = 2
width = {side}
height = {side}
guidance_scale = 1.0

[sde]
num_steps = 2

[rollout]
batch_size = 1
n_samples_per_prompt = 4

[rollout.local]
rows = 4
weights = "{weights}"
adapters = "{adapters}"

[reward]
type = "jpeg"

[train]
num_rollout = 1
micro_batch_size = 4
forward_dtype = "bf16"
"""


def shaken(run: Run, seed: int) -> None:
    """Give the adapters other values, as an optimizer step does."""
    generator = torch.Generator(run.context.device).manual_seed(seed)
    for one in run.components.values():
        for pair in adapters(one.module).values():
            pair.B.data.normal_(std=0.01, generator=generator)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, work on the device included."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


@contextmanager
def collections() -> Iterator[list[float]]:
    """Note how long Python's garbage collector stops the process, each time."""
    pauses: list[float] = []
    began = 0.0

    def noted(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(noted)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(noted)


def pushes(run: Run, options: argparse.Namespace) -> Row:
    """Push again and again; return the first push, those after it, and the parts of one."""
    times = []
    with collections() as pauses:
        for version in range(options.warmup + options.repeats):
            shaken(run, version)
            times.append(seconds_of(lambda version=version: sync(run, version), options.device))
    later = times[options.warmup :]
    row: Row = {
        "first ms": times[0] * 1e3,
        "sync ms": median(later) * 1e3,
        "from ms": min(later) * 1e3,
        "to ms": max(later) * 1e3,
        "collector ms": max(pauses, default=0.0) * 1e3,
    }
    return row | parts(run, options)


def parts(run: Run, options: argparse.Namespace) -> Row:
    """Time what a push consists of."""
    (module,) = [one.module for one in run.components.values()]
    held = component_of(run)
    sent = {
        f"{layer}.{matrix}": tensor.detach()
        for layer, pair in adapters(module).items()
        for matrix, tensor in (("lora_A", pair.A), ("lora_B", pair.B))
    }
    stage = Stage(adapters=sent, lora=dict.fromkeys(sent, lora_of(run)))
    works = {
        "digest ms": lambda: tensors_digest(sent, sent.values()),
        "merge ms": lambda: held.prepare(stage),
        "fingerprint ms": lambda: tensors_fingerprint(held.held(), held.held().values()),
    }
    figures: Row = {"adapter MB": sum(tensor.nbytes for tensor in sent.values()) / 1e6}
    for name, work in works.items():
        with torch.no_grad():
            taken = [seconds_of(work, options.device) for _ in range(options.repeats)]
        figures[name] = median(taken) * 1e3
    return figures


def component_of(run: Run) -> Component:
    """Return what the engine holds."""
    assert run.engines is not None
    (held,) = run.engines.engine.store.components.values()  # type: ignore[attr-defined]
    component: Component = held
    return component


def lora_of(run: Run) -> LoraFields:
    """Return rank and alpha as a bucket carries them."""
    (one,) = run.components.values()
    return lora_fields(one.module)


def turns(run: Run, options: argparse.Namespace) -> Row:
    """Let trainer and engine leave and return, twice; the first time makes pinned memory."""
    engines, trainer, device = run.engines, run.trainer, options.device
    assert engines is not None
    shares = component_of(run).shared
    moves: dict[str, Callable[[], object]] = {
        "sleep": lambda: trainer.sleep(frozen=not shares),
        "wake": trainer.wake,
        "release": lambda: [engines.release(what) for what in (Memory.REST, Memory.WEIGHTS)],
        "resume": lambda: [engines.resume(what) for what in (Memory.WEIGHTS, Memory.REST)],
    }
    row: Row = {"engine's own GiB": sum(t.nbytes for t in component_of(run).own()) / GIB}
    for _ in range(2):
        for name, move in moves.items():
            before = held_gib(device)
            row[f"{name} ms"] = seconds_of(move, device) * 1e3
            if before is not None and name in ("sleep", "release"):
                row[f"{name} frees GiB"] = before - (held_gib(device) or 0.0)
    return row


def held_gib(device: str) -> float | None:
    """Return the memory that tensors hold on a GPU; None on a CPU."""
    return torch.cuda.memory_allocated() / GIB if device.startswith("cuda") else None


def trial(way: str, options: argparse.Namespace, folder: Path) -> Row:
    """Open a run whose engine holds its weights in this way, and measure."""
    weights, how = WAYS[way]
    scale = SCALES[options.size]
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "a sign"}\n')
    recipe = folder / "recipe.toml"
    text = RECIPE.format(
        checkpoint=folder / "pipeline",
        prompts=prompts,
        rank=scale.rank,
        device=options.device,
        side=8 * scale.side,
        weights=weights,
        adapters=how,
    )
    recipe.write_text(text)
    with open_run(recipe, folder / way.replace(" ", "-")) as run:
        row = {"engine": way, **pushes(run, options), **turns(run, options)}
    free()
    print(row, file=sys.stderr)
    return row


def main() -> None:
    """Measure every way, one after the other."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=WAYS, help="one way of holding weights")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_pipeline(folder / "pipeline", SIZES[options.size], device=options.device, seed=0)
        free()
        rows = [trial(way, options, folder) for way in WAYS if options.only in (None, way)]
    names = list(rows[0])
    cut = names.index("engine's own GiB")
    report("sync", options, rows, columns=[names[:cut], ["engine", *names[cut:]]])


if __name__ == "__main__":
    main()
