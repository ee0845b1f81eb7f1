"""What a checkpoint costs: a synchronous save, how long an asynchronous one blocks, loading.

``python benchmarks/checkpoint_save.py`` trains two models for a few steps, adapters and full weights,
and saves their state (for full weights 12 bytes a parameter) through the run's own trainer. One
checkpoint lies on the disk at a time. After loading, every parameter must have the bits that were saved.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from common import GIB, MEDIUM, SCALES, SMALL, Row, arguments, free, report, sync
from gpu.pipelines import write_pipeline
from gpu.runs import open_run
from torch import Tensor

from drl.run import Run
from drl.stages.advantage import estimate
from drl.stages.encode import collect_records
from drl.stages.pairs import make_shards
from drl.stages.save import finish_saving, save

SIZES = {"medium": MEDIUM, "small": SMALL}
STEPS = 3
RECIPE = """
[model]
checkpoint = "{checkpoint}"

[lora]
enabled = {adapters}
rank = {rank}
alpha = 64

[cluster]
device = "{device}"

[data]
source = "glyphs"

[data.glyphs]
count = 64

[sampling]
width = {side}
height = {side}

[rollout]
batch_size = {batch}

[algorithm]
loss = "sft_loss"

[train]
train_only = true
num_rollout = 1000
micro_batch_size = {batch}
forward_dtype = "bf16"

[optimizer]
lr = 1e-5

[checkpoint]
every_minutes = 600
"""


class Trial:
    """An open run: its steps, and the folder that checkpoints go into, one at a time."""

    def __init__(self, run: Run, folder: Path, device: str) -> None:
        self.run = run
        self.folder = folder
        self.device = device
        self.done = 0

    def step(self) -> float:
        """Take one optimizer step; return its seconds, encoding of the pictures left out."""
        rollout = collect_records(self.run, self.done)
        shards = make_shards(self.run, rollout, estimate(self.run, rollout))
        sync(self.device)
        began = time.perf_counter()
        list(self.run.trainer.train(shards))
        sync(self.device)
        self.done += 1
        return time.perf_counter() - began

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Give an empty folder that is gone afterwards, and with it the bytes on the disk."""
        path = self.folder / "checkpoint"
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters on the CPU."""
        return {
            f"{component}.{name}": parameter.detach().to("cpu", copy=True)
            for component, one in self.run.components.items()
            for name, parameter in one.module.named_parameters()
            if parameter.requires_grad
        }


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, work on the device included."""
    sync(device)
    began = time.perf_counter()
    work()
    sync(device)
    return time.perf_counter() - began


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(trial: Trial) -> Iterator[Row]:
    """Yield the figures of one kind of training as they are known."""
    steps = [trial.step() for _ in range(STEPS)]
    yield {"step s": median(steps[1:])}
    whole = synchronous(trial)
    yield whole
    for which in ("first", "later"):
        found = asynchronous(trial, which)
        yield found | {f"{which} block / sync": found[f"{which} block s"] / whole["sync s"]}
        trial.step()
    yield whole_save(trial)


def synchronous(trial: Trial) -> Row:
    """Save, then load; the loaded parameters have the saved bits."""
    trainer = trial.run.trainer
    with trial.place() as path:
        took = seconds_of(lambda: trainer.save(path), trial.device)
        size = size_of(path)
        before = trial.parameters()
        trial.step()
        load = seconds_of(lambda: trainer.restore(path), trial.device)
        after = trial.parameters()
    equal = all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert equal, "the loaded parameters differ from the saved ones"
    return {"GiB": size / GIB, "sync s": took, "sync GB/s": size / took / 1e9, "load s": load}


def asynchronous(trial: Trial, which: str) -> Row:
    """Begin a save and train on until it is written."""
    with trial.place() as path:
        sync(trial.device)
        began = time.perf_counter()
        future = trial.run.trainer.begin_save(path)
        block = time.perf_counter() - began
        steps = []
        while not future.done():
            steps.append(trial.step())
        future.result()
        background = time.perf_counter() - began
    row: Row = {f"{which} block s": block, f"{which} background s": background}
    return row | {f"{which} step s": median(steps) if steps else None}


def whole_save(trial: Trial) -> Row:
    """Save as an iteration does, digests, flushing and adapter included, until all is on the disk."""
    run = trial.run
    began = time.perf_counter()
    save(run, trial.done - 1)
    block = time.perf_counter() - began
    finish_saving(run)
    return {"iteration block s": block, "iteration save s": time.perf_counter() - began}


def main() -> None:
    """Measure adapters, then full weights."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--only", choices=("adapters", "full"), help="one kind of training")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder) as name:
        rows: dict[str, Row] = {}
        for kind in ("adapters", "full"):
            if options.only in (None, kind):
                rows[kind] = {}
                trial_of(kind, options, Path(name), rows[kind])
                # after each: a run that is stopped keeps the first kind
                report("checkpoint_save", options, lines_of(rows))


def lines_of(rows: Mapping[str, Row]) -> list[Row]:
    """Turn a row per kind of training into a line per figure."""
    figures = list(dict.fromkeys(figure for row in rows.values() for figure in row))
    return [{"figure": f, **{kind: row.get(f) for kind, row in rows.items()}} for f in figures]


def trial_of(kind: str, options: argparse.Namespace, folder: Path, row: Row) -> None:
    """Open a run of this kind, measure into the row, and leave nothing behind."""
    pipeline = folder / "pipeline"
    if not pipeline.exists():
        write_pipeline(pipeline, SIZES[options.size], device=options.device, seed=0)
        free()
    scale = SCALES[options.size]
    recipe = folder / f"{kind}.toml"
    text = RECIPE.format(
        checkpoint=pipeline,
        adapters="true" if kind == "adapters" else "false",
        rank=scale.rank,
        device=options.device,
        side=8 * scale.side,
        batch=scale.batch,
    )
    recipe.write_text(text)
    with open_run(recipe, folder / kind) as run:
        for figures in measure(Trial(run, folder, options.device)):
            row |= figures
            print(f"{kind}: {figures}", file=sys.stderr)
    shutil.rmtree(folder / kind)
    free()


if __name__ == "__main__":
    main()
