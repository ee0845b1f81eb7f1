"""Whole iterations on one card, and how far its engine and trainer are apart, with a pipeline of random weights.

``python benchmarks/one_gpu.py`` runs ``drl bench`` on the shipped recipes, each time as a process of its own: a
Flow-GRPO iteration of 8 prompts x 8 samples; the presets (``24gb``, ``80gb``, ``nft-24gb``, ``nft-80gb``) with no
more memory than such a card has; and rollouts of 16, 64 and 256 samples. It prints seconds by phase, rates, peak
memory, and how far ``drl plan`` was from them. ``--cases align`` runs ``drl align`` in bfloat16 with adapters that
change the model: without guidance and with it, eager and compiled blocks, adapters merged into the engine's weights
and applied beside them. It prints the difference of log-probs between engine and trainer, over all steps and at
each.

A case that fails, or takes longer than ``--limit``, is ended with all its processes and shown as such; figures
are written after each case.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

from common import GIB, ROOT, Row, arguments, report, table, write
from gpu.pipelines import MEDIUM, SMALL, write_pipeline
from limited import run_limited

SD3 = ROOT / "recipes" / "sd3"
PHASES = ("rollout", "train", "update_weights", "reward", "reward_wait", "unaccounted")
"""``reward`` is time beside the rollout, ``reward_wait`` a part of it."""
PLANNED = ("rollout", "train", "update_weights")
STEP_FIGURES = ("mean", "max")
SPEED = {
    "images/s": "perf/images_per_second",
    "pairs/s": "perf/pairs_per_second",
    "rollout TFLOP/s": "perf/rollout_tflops",
    "train TFLOP/s": "perf/train_tflops",
    "train MFU": "perf/train_mfu",
    "driver share": "perf/driver_share",
}


@dataclass(frozen=True)
class Case:
    """One call of ``drl bench`` or ``drl align``: the recipe, what is changed in it, more arguments.

    ``real``: arguments that are left out at the small size.
    """

    name: str
    recipe: str
    sets: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    real: tuple[str, ...] = ()
    command: str = "bench"


ITERATION = (
    "rollout.n_samples_per_prompt=8",
    "sde.num_steps=2",
    "sde.sde_window.range=[0, 5]",
    "train.micro_batch_size=16",
    "algorithm.kl_beta=0",
)
BENCHES = (
    Case("iteration", "flow_grpo_80gb.toml", ITERATION),
    Case("no-guidance", "flow_grpo_80gb.toml", (*ITERATION, "sampling.guidance_scale=1")),
    Case("24gb", "flow_grpo_24gb.toml", real=("--memory", "24GiB")),
    Case("80gb", "flow_grpo_80gb.toml", real=("--memory", "80GiB")),
    Case("nft-24gb", "nft_24gb.toml", real=("--memory", "24GiB")),
    Case("nft-80gb", "nft_80gb.toml", real=("--memory", "80GiB")),
    Case(
        "growth",
        "flow_grpo_80gb.toml",
        (*ITERATION, "sampling.guidance_scale=1", "train.global_batch_size=16"),
        arguments=("--vary", "rollout.batch_size=2,8,32"),
        # launched kernel by kernel, iterations of 256 pictures took 27 to 34 s; replayed 25 s
        real=("--set", "rollout.local.cuda_graphs=true"),
    ),
)


def comparison(guidance: str, blocks: str, adapters: str) -> Case:
    """Return a comparison of engine and trainer on 8 samples of all ten steps."""
    compiled = blocks == "compiled"
    sets = (
        "rollout.n_samples_per_prompt=8",
        "train.forward_dtype=bf16",
        f"sampling.guidance_scale={4.5 if guidance == 'guidance' else 1}",
        f"train.compile={str(compiled).lower()}",
        f"rollout.local.compile={str(compiled).lower()}",
        f"rollout.local.adapters={adapters}",
        "model.sd3.compile_vae=false",  # no part of what is compared
    )
    # each change that is tried would be compiled anew
    words = ("--samples", "8", "--no-causes" if compiled else "--causes")
    name = f"align-{guidance}-{blocks}-{adapters}"
    return Case(name, "flow_grpo_80gb.toml", sets, words, command="align")


ALIGNS = tuple(
    comparison(*ways)
    for ways in product(("plain", "guidance"), ("eager", "compiled"), ("merged", "applied"))
)
CASES = {case.name: case for case in (*BENCHES, *ALIGNS)}
SMALL_SETS = (
    "sampling.height=64",
    "sampling.width=64",
    "lora.rank=4",
    "rollout.local.rows=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.microgroup_size=4",
    "train.global_batch_size=16",
    "rollout.batch_size=4",
    "train.micro_batch_size=4",
    "train.compile=false",
    "rollout.local.compile=false",
    "model.sd3.compile_vae=false",
)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--cases",
        default="iteration,24gb,growth",
        help=f"by comma: names, patterns or beginnings ('align') of {', '.join(CASES)}",
    )
    parser.add_argument("--iterations", type=int, default=3, help="of each run; the first is apart")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="most that one case takes")
    options = parser.parse_args()
    try:
        cases = chosen(options.cases)
    except ValueError as error:
        parser.error(str(error))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        size = MEDIUM if options.size == "medium" else SMALL
        write_pipeline(Path(folder) / "pipeline", size, device=options.device, seed=0)
        for case in cases:
            found = measured(case, options, Path(folder))
            rows += found
            for columns in columns_of(found) if len(cases) > 1 else ():
                print(table(found, columns), flush=True)
            if options.out is not None:
                write("one_gpu", options, rows)
    report("one_gpu", options, rows, columns=columns_of(rows))


def chosen(text: str) -> list[Case]:
    """Return the cases that a list names, in its order; ValueError for a word that names none."""
    names: list[str] = []
    for word in text.split(","):
        fitting = [n for n in CASES if n == word or n.startswith(f"{word}-") or fnmatch(n, word)]
        if not fitting:
            raise ValueError(f"--cases: nothing is named {word!r}; there are {', '.join(CASES)}")
        names += fitting
    return [CASES[name] for name in dict.fromkeys(names)]


def measured(case: Case, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run one case; return its rows, and one that says so where it failed."""
    began = time.perf_counter()
    align = case.command == "align"
    figures = folder / case.name / "align.json" if align else folder / f"{case.name}.json"
    code = run_limited(words_of(case, options, folder, figures), options.limit)
    seconds = time.perf_counter() - began
    # align: 1 says that a difference is above the limit of the recipe
    failed: list[Row] = []
    if code is None:
        failed = [{"case": case.name, "failed": f"ended after {seconds:.0f} s"}]
    elif code not in ((0, 1) if align else (0,)):
        failed = [{"case": case.name, "failed": f"exit code {code}"}]
    if not figures.is_file():
        return failed or [{"case": case.name, "failed": "no figures"}]
    made = json.loads(figures.read_text())
    if align:
        return [aligned(case.name, made) | {"align s": seconds}, *failed]
    # of a varied option: those of the values that were done
    benches = made if isinstance(made, list) else [made]
    return [*(row_of(case.name, one) | {"whole s": seconds} for one in benches), *failed]


def words_of(case: Case, options: argparse.Namespace, folder: Path, figures: Path) -> list[str]:
    """Return the command of a case, which leaves its figures in a file."""
    sets = (
        f"model.checkpoint={folder / 'pipeline'}",
        f"cluster.device={options.device}",
        "reward.type=jpeg",
        *(SMALL_SETS if options.size == "small" else ()),
        *case.sets,
    )
    words = [sys.executable, "-m", "drl_cli", case.command, str(SD3 / case.recipe)]
    words += [word for one in sets for word in ("--set", one)]
    words += [*case.arguments, *(case.real if options.size == "medium" else ())]
    if case.command == "align":
        return [*words, "--out", str(figures.parent)]
    words += ["--iterations", str(options.iterations), "--rewards", "recipe", "--compare"]
    return [*words, "--json", str(figures)]


def aligned(name: str, made: Mapping[str, Any]) -> Row:
    """Return the figures of one comparison in one row: differences of log-probs, |trainer - engine|."""
    row: Row = {
        "case": name,
        "pairs": made["pairs"],
        "mean": made["log_prob_mean_abs_diff"],
        "max": made["log_prob_max_abs_diff"],
        "output max": largest([step["output_max"] for step in made["steps"]]),
        "within": "exact" if made["exact"] else "yes" if made["within"] else "no",
        "causes": "; ".join(made["causes"]) or None,
    }
    for figure in STEP_FIGURES:
        steps = {step["step"]: step[f"log_prob_{figure}"] for step in made["steps"]}
        row |= {f"{figure} {number}": value for number, value in steps.items()}
    return row


def largest(values: Sequence[float | None]) -> float | None:
    """Return the largest of some figures; None where one is missing."""
    there = [value for value in values if value is not None]
    return max(there) if there and len(there) == len(values) else None


def columns_of(rows: Sequence[Row]) -> list[list[str]]:
    """Return the tables that rows have something for: what is in a table is a figure of one kind."""
    steps = {
        figure: [name for row in rows for name in row if name.startswith(f"{figure} ")]
        for figure in STEP_FIGURES
    }
    tables = [
        ["iteration s", *(f"{phase} s" for phase in PHASES), "whole s"],
        list(SPEED),
        [f"{phase} GiB" for phase in PLANNED],
        [f"plan {phase} {unit} %" for phase in PLANNED for unit in ("s", "GiB")],
        ["pairs", "mean", "max", "output max", "within", "align s"],
        *(list(dict.fromkeys(names)) for names in steps.values()),
        ["causes"],
        ["failed"],
    ]
    known = {name for row in rows for name, value in row.items() if value is not None}
    return [["case", *columns] for columns in tables if known & set(columns)]


def row_of(name: str, made: dict[str, Any]) -> Row:
    """Return the figures of one bench in one row; errors of ``drl plan`` in percent."""
    seconds, speed, peaks = dict(made["seconds"]), made["speed"], made["peak_gib"]
    seconds |= made.get("beside", {})
    planned = made.get("predicted", {})
    row: Row = {"case": name, "iteration s": made["step_seconds"]}
    row |= {f"{phase} s": seconds.get(phase) for phase in PHASES}
    row |= {title: speed.get(metric) for title, metric in SPEED.items()}
    row |= {f"{phase} GiB": peaks.get(phase) for phase in PLANNED}
    for phase in PLANNED:
        row[f"plan {phase} s %"] = error_of(
            (planned.get("seconds") or {}).get(phase), seconds.get(phase)
        )
        size = (planned.get("peak_bytes") or {}).get(phase)
        row[f"plan {phase} GiB %"] = error_of(
            None if size is None else size / GIB, peaks.get(phase)
        )
    return row


def error_of(planned: float | None, measured: float | None) -> float | None:
    """Return how far a prediction is off, in percent of what was measured."""
    return 100 * (planned / measured - 1) if planned and measured else None


if __name__ == "__main__":
    main()
