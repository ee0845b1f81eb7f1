"""What the product adds to a bare forward and backward, and how a step grows with its micro-batches.

``python benchmarks/training_loop.py`` trains adapters with Flow-GRPO's loss through the product's own trainer
on prepared pairs: uploads, log-probs, loss, metrics, norm, clipping, AdamW. Beside it, in turns, the same
module's forward and backward alone, on inputs that lie on the device, and a plain training loop in the style
of published scripts: stock peft, eager mode, the same pairs (``plain_loop.py``, left out by ``--no-plain``).
``host ms`` is the time until everything of a micro-batch is launched: where it is the larger one, the GPU waits
for the host. ``apart``: outputs of compiled blocks against eager ones.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from common import (
    SCALES,
    Row,
    Scale,
    apart_from_eager,
    arguments,
    bytes_of,
    fits,
    free,
    in_rounds,
    inputs,
    mean_square,
    peak_gib,
    peak_of,
    report,
    reset_peak,
    sync,
    transformer,
    wall_milliseconds,
    write,
)
from plain_loop import PlainLoop, Settings, stacked
from prepared_pairs import NAME, samples_of, write_recipe
from torch import nn

from drl.api import RowShape
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.interfaces.family import Family, WeightSource
from drl.mathematics.feeding import DTYPES
from drl.model.build import build_components
from drl.model.compiled import Compilations
from drl.model.trainer import Trainer
from drl.observe.work import WorkCounter
from drl.stages.loss import OLD
from drl.stages.pairs import build_shards
from drl.stages.parity import log_probs
from drl.stages.step import accumulate
from drl.trainers import Maker, build_loss, build_trainer, rank_context, rank_settings
from drl.trainers import trainer_backends as backends_of
from drl.types import Guidance, Shard


@dataclass(frozen=True)
class Case:
    """One way to train; ``home``: where the pairs' tensors are when training starts."""

    name: str
    scale: float = 1.0
    checkpointing: bool = False
    home: str = "device"

    @property
    def branches(self) -> int:
        """Rows of a forward for each pair."""
        return 2 if self.scale > 1 else 1


CASES = (
    Case("plain"),
    Case("from the CPU", home="cpu"),
    Case("guidance", scale=4.5),
    Case("checkpointing", checkpointing=True),
)


class Trial:
    """The product's trainer on a transformer of random weights, and pairs for it."""

    def __init__(self, options: argparse.Namespace, folder: Path, *, checkpointing: bool) -> None:
        self.options = options
        self.size: Scale = replace(SCALES[options.size], batch=options.rows)
        catalog = Catalog.load()
        file = write_recipe(
            self.size,
            folder,
            device=options.device,
            compiled=not options.eager,
            checkpointing=checkpointing,
        )
        recipe: Any = load_recipe(file, catalog=catalog)
        context = rank_context(recipe, None, rank_settings(recipe), 0)
        make = Maker(recipe, catalog, context)
        self.recipe = recipe
        self.family: Family = make("family", "sd3", "model")
        loss = build_loss(make)
        self.compilations = None if options.eager else Compilations("trainer", options.compiler)
        self.components = build_components(
            recipe, self.family, context, load=self._module, compilations=self.compilations
        )
        backends = backends_of(make, recipe)
        self.trainer: Trainer = build_trainer(
            recipe, context, self.family, loss, backends, self.components
        )
        self.checkpoint: str = recipe.model.checkpoint
        self.model: nn.Module = self.components[NAME].module

    def plain_loop(self) -> PlainLoop:
        """Return a plain loop on the same weights, in the dtypes that training has."""
        dtype = DTYPES[self.trainer.forward.dtype]
        return PlainLoop(
            transformer(self.size, self.options.device, dtype),
            rank=self.size.rank,
            device=self.options.device,
            dtype=dtype,
            checkpointing=self.recipe.model.gradient_checkpointing,
        )

    def settings(self, case: Case) -> Settings:
        """Return the numbers by which a plain loop does the same work."""
        loss, optimizer = self.trainer.forward.loss, self.recipe.optimizer
        return Settings(
            noise_level=self.recipe.sde.noise_level,
            guidance=case.scale,
            clip_range=loss.options.clip_range,
            adv_clip_max=self.recipe.algorithm.adv_clip_max,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            clip_grad=optimizer.clip_grad,
        )

    def _module(self, family: Family, name: str, source: WeightSource) -> nn.Module:
        return transformer(self.size, self.options.device, DTYPES[source.dtype])

    @contextmanager
    def case(self, case: Case) -> Iterator[None]:
        """Let the trainer train this way."""
        before = self.trainer.forward
        guidance = {"guidance_scale": Guidance(scale=case.scale)}
        self.trainer.forward = replace(before, guidance=guidance, batched_guidance=True)
        try:
            yield
        finally:
            self.trainer.forward = before

    def shard(self, case: Case, count: int) -> Shard:
        """Return pairs of ``count`` micro-batches, with the log-probs that the present weights give."""
        home = self.options.device if case.home == "device" else case.home
        samples = samples_of(self.size, count * self.size.batch // 2, home)
        loss, context = self.trainer.forward.loss, self.trainer.context
        advantages = torch.linspace(-1.0, 1.0, len(samples)).tolist()
        units = [
            loss.expand([sample], [advantage], context)
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        (shard,) = build_shards(
            units, steps=1, micro_batch_size=self.size.batch, ranks=1, rollout_id=0
        )
        with self.case(case):
            batches = [(pairs, context) for pairs in shard.windows[0]]
            scores = iter(log_probs(self.trainer.forward, batches).tolist())
        window = [
            tuple(replace(pair, values={**pair.values, OLD: next(scores)}) for pair in pairs)
            for pairs in shard.windows[0]
        ]
        return replace(shard, windows=[window])

    def product(self, shard: Shard) -> Mapping[str, float]:
        """Train one optimizer step; return its metrics."""
        (step,) = self.trainer.train([shard])
        if step.skipped is not None:
            raise RuntimeError(f"the step was skipped: {step.skipped}")
        return step.metrics

    def bare(self, case: Case, count: int) -> Callable[[], None]:
        """Return ``count`` forwards and backwards of the module alone."""
        rows = replace(self.size, batch=self.size.batch * case.branches)
        given = inputs(rows, self.options.device, torch.float32)

        def work() -> None:
            for _ in range(count):
                with self.trainer.forward.autocast():
                    loss = mean_square(self.model(**given))
                loss.backward()
            self.model.zero_grad(set_to_none=True)

        return work

    def host_ms(self, case: Case, shard: Shard) -> float:
        """Return the milliseconds until the kernels of a micro-batch are launched."""
        sync(self.options.device)
        with self.case(case):
            began = time.perf_counter()
            accumulate(self.trainer.forward, shard.windows[0], 1.0, self.trainer.context)
            spent = time.perf_counter() - began
        sync(self.options.device)
        self.model.zero_grad(set_to_none=True)
        return spent * 1e3 / len(shard.windows[0])

    def flops(self, case: Case) -> float:
        """Return the work of one pair, by the family's count."""
        counter = WorkCounter(
            family=self.family,
            loss=self.trainer.forward.loss,
            components=self.components,
            checkpoint=self.checkpoint,
            branches=case.branches,
        )
        latent = (16, self.size.side, self.size.side)
        work = counter.row(NAME, RowShape(latent=latent, text_tokens=self.size.tokens))
        assert work is not None
        return case.branches * work.training


def in_turns(
    works: Mapping[str, Callable[[], object]], options: argparse.Namespace
) -> dict[str, float]:
    """Return the median milliseconds of each work by the wall clock."""
    return in_rounds(
        works,
        options.device,
        repeats=options.repeats,
        warmup=options.warmup,
        timed=wall_milliseconds,
    )


def compare(
    trial: Trial, plain: PlainLoop | None, case: Case, options: argparse.Namespace
) -> list[Row]:
    """Return a row: one optimizer step of some micro-batches through the product, and their bare passes.

    With a plain loop, two more: the product's step and the loop's.
    """
    count = options.micro_batches[0] if options.quick else 4
    shard = trial.shard(case, count)
    loops: dict[str, Callable[[], object]] = {"product": lambda: trial.product(shard)}
    if plain is not None:
        batches, settings = [stacked(pairs) for pairs in shard.windows[0]], trial.settings(case)
        if fits(lambda: plain.step(batches, settings), f"{case.name}: the plain loop"):
            loops["script"] = lambda: plain.step(batches, settings)
    with trial.case(case):
        found = in_turns({"bare": trial.bare(case, count), **loops}, options)
        peaks = peaks_of(loops, trial, plain)
    pairs = count * options.rows
    seconds = found["product"] / 1e3
    row = {
        "case": case.name,
        "bare ms": found["bare"] / count,
        "product ms": found["product"] / count,
        "ratio": found["product"] / found["bare"],
        "host ms": trial.host_ms(case, shard),
        "pairs/s": pairs / seconds,
        "TFLOP/s": pairs * trial.flops(case) / seconds / 1e12,
        "peak GiB": peaks["product"],
    }
    beside = [
        {
            "loop": f"{case.name}: {name}",
            "loop ms": found[name] / count,
            "loop pairs/s": 1e3 * pairs / found[name],
            "of the product": found[name] / found["product"],
            "loop GiB": peaks[name],
        }
        for name in loops
    ]
    return [row, *(beside if len(loops) > 1 else [])]


def peaks_of(
    loops: Mapping[str, Callable[[], object]], trial: Trial, plain: PlainLoop | None
) -> dict[str, float | None]:
    """Return the most GiB while each loop trains a step, without what the other one holds."""
    held = {"product": bytes_of(trial.model, trial.trainer.optimizer)}
    if plain is not None:
        held["script"] = bytes_of(plain.model, plain.optimizer)
    everything = sum(held.values())
    return {
        name: peak_of(work, trial.options.device, everything - held[name])
        for name, work in loops.items()
    }


def growth(trial: Trial, case: Case, options: argparse.Namespace) -> list[Row]:
    """Return time and memory of one optimizer step by its micro-batches, with the line through them."""
    shards = {count: trial.shard(case, count) for count in options.micro_batches}
    rows: list[Row] = []
    with trial.case(case):
        works = {
            str(count): (lambda shard=shard: trial.product(shard))
            for count, shard in shards.items()
        }
        found = in_turns(works, options)
        for count, shard in shards.items():
            reset_peak(options.device)
            trial.product(shard)
            rows.append(
                {
                    "step": case.name,
                    "micro-batches": count,
                    "ms": found[str(count)],
                    "step peak GiB": peak_gib(options.device),
                }
            )
    return with_line(rows)


def with_line(rows: Sequence[Row]) -> list[Row]:
    """Add the least-squares line through (micro-batches, ms), and how far each row is off it."""
    if len(rows) < 2:
        return list(rows)
    slope, start = linear_regression([r["micro-batches"] for r in rows], [r["ms"] for r in rows])
    lines = [start + slope * row["micro-batches"] for row in rows]
    return [
        {**row, "line ms": line, "off %": 100 * (row["ms"] / line - 1)}
        for row, line in zip(rows, lines, strict=True)
    ]


def graphs(trial: Trial, case: Case) -> list[Row]:
    """Return how many graphs were compiled, how many of them fixed shapes make needless, and ``apart``."""
    log = trial.compilations
    if log is None:
        return []
    # counted before: with guidance the rows here are others than in training, and need a graph of their own
    row = {"case": case.name, "graphs": log.graphs, "unexpected": log.unexpected}
    given = inputs(trial.size, trial.options.device, torch.float32)
    with trial.case(case), trial.trainer.forward.autocast():
        return [row | apart_from_eager(trial.model, given)]


def keep(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write what is measured so far, in case the rest is not."""
    if options.out is not None:
        write("training_loop", options, rows)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    names = [case.name for case in CASES]
    parser.add_argument("--rows", type=int, help="pairs of a micro-batch (16; 2 for size small)")
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--compiler", default="inductor", help="what compiles the blocks")
    parser.add_argument(
        "--no-plain", dest="plain", action="store_false", help="leave the plain training loop out"
    )
    parser.add_argument("--quick", action="store_true", help="compare with the first number alone")
    options = parser.parse_args()
    options.rows = options.rows or (16 if options.size == "medium" else 2)
    cases = [case for case in CASES if case.name in options.cases]
    rows: list[Row] = []
    for checkpointing in sorted({case.checkpointing for case in cases}):
        same = [case for case in cases if case.checkpointing == checkpointing]
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(options, Path(folder), checkpointing=checkpointing)
            plain = trial.plain_loop() if options.plain else None
            for case in same:
                rows += compare(trial, plain, case, options)
                keep(options, rows)
        del plain
        free()
        rows += growth(trial, same[0], options)
        rows += graphs(trial, same[0])
        keep(options, rows)
        del trial
    times = ["bare ms", "product ms", "ratio", "host ms"]
    figures = ["case", *times, "pairs/s", "TFLOP/s", "peak GiB"]
    loops = ["loop", "loop ms", "loop pairs/s", "of the product", "loop GiB"]
    steps = ["step", "micro-batches", "ms", "line ms", "off %", "step peak GiB"]
    columns = [figures, *([loops] if options.plain else []), steps]
    compiled = ["case", "graphs", "unexpected", "apart mean", "apart max", "deviation"]
    columns += [] if options.eager else [compiled]
    report("training_loop", options, rows, columns=columns)


if __name__ == "__main__":
    main()
