"""Whole iterations on one card: ``drl bench`` on the shipped recipes, with a pipeline of random weights.

``python benchmarks/one_gpu.py`` runs, each as a process of its own: a Flow-GRPO iteration of 8 prompts x 8
samples; the 24 GB preset with no more memory than such a card has; and rollouts of 16, 64 and 256 samples. It
prints seconds by phase, rates, peak memory, and how far ``drl plan`` was from them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import GIB, ROOT, Row, arguments, report
from gpu.pipelines import MEDIUM, SMALL, write_pipeline

SD3 = ROOT / "recipes" / "sd3"
PHASES = ("rollout", "train", "update_weights", "reward", "unaccounted")
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
    """One call of ``drl bench``: the recipe, what is changed in it, more arguments."""

    name: str
    recipe: str
    sets: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


ITERATION = (
    "rollout.n_samples_per_prompt=8",
    "sde.num_steps=2",
    "sde.sde_window.range=[0, 5]",
    "train.micro_batch_size=16",
    "algorithm.kl_beta=0",
)
CASES = {
    "iteration": Case("iteration", "flow_grpo_80gb.toml", ITERATION),
    "no-guidance": Case(
        "no-guidance", "flow_grpo_80gb.toml", (*ITERATION, "sampling.guidance_scale=1")
    ),
    "24gb": Case("24gb", "flow_grpo_24gb.toml", arguments=("--memory", "24GiB")),
    "growth": Case(
        "growth",
        "flow_grpo_80gb.toml",
        (*ITERATION, "sampling.guidance_scale=1"),
        ("--vary", "rollout.batch_size=2,8,32"),
    ),
}
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
    parser.add_argument("--cases", default="iteration,24gb,growth", help=f"of {', '.join(CASES)}")
    parser.add_argument("--iterations", type=int, default=3, help="of each run; the first is apart")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        size = MEDIUM if options.size == "medium" else SMALL
        write_pipeline(Path(folder) / "pipeline", size, device=options.device, seed=0)
        for name in options.cases.split(","):
            rows += bench(CASES[name], options, Path(folder))
            report("one_gpu", options, rows)


def bench(case: Case, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run one case; return a row per bench, or one that says why there is none."""
    figures = folder / f"{case.name}.json"
    small = SMALL_SETS if options.size == "small" else ()
    sets = (
        f"model.checkpoint={folder / 'pipeline'}",
        f"cluster.device={options.device}",
        "reward.type=jpeg",
        *case.sets,
        *small,
    )
    words = [sys.executable, "-m", "drl_cli", "bench", str(SD3 / case.recipe)]
    words += [word for one in sets for word in ("--set", one)]
    words += ["--iterations", str(options.iterations), "--rewards", "recipe", "--compare"]
    words += ["--json", str(figures), *(case.arguments if not small else case.arguments[:0])]
    began = time.perf_counter()
    code = subprocess.run(words, check=False).returncode
    if code:
        return [{"case": case.name, "exit code": code}]
    made = json.loads(figures.read_text())
    seconds = time.perf_counter() - began
    benches = made if isinstance(made, list) else [made]
    return [row_of(case.name, one) | {"whole s": seconds} for one in benches]


def row_of(name: str, made: dict[str, Any]) -> Row:
    """Return the figures of one bench in one row; errors of ``drl plan`` in percent."""
    seconds, speed, peaks = made["seconds"], made["speed"], made["peak_gib"]
    planned = made.get("predicted", {})
    row: Row = {"case": name, "iteration s": made["step_seconds"]}
    row |= {f"{phase} s": seconds.get(phase) for phase in PHASES}
    row |= {title: speed.get(metric) for title, metric in SPEED.items()}
    row |= {f"{phase} GiB": peaks.get(phase) for phase in ("rollout", "train")}
    for phase in ("rollout", "train"):
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
