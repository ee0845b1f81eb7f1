"""Shared pieces of the end-to-end tests: a tiny recipe, runs in this process and in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drl.catalog import Catalog
from drl.checkpoint import read_weights
from drl.checkpoint.dcp import read_whole
from drl.checkpoint.folders import TRACKER
from drl.launch import run_recipe

TIMES = ("perf/", "time")

RECIPE = """
[run]
name = "tiny"
directory = "runs"

[model]
checkpoint = "{checkpoint}"

[lora]
enabled = true
rank = 4
alpha = 8

[data]
prompt_data = "prompts.jsonl"

[sampling]
num_steps = 4
width = 32
height = 32
guidance_scale = 1.0

[rollout]
batch_size = 2
n_samples_per_prompt = 4
microgroup_size = 2

[rollout.local]
rows = 4

[sde]
type = "cps"
step_strategy = "sde_window"
num_steps = 2

[sde.sde_window]
range = [0, 3]

[reward]
type = "jpeg"

[algorithm.policy_loss]
clip_range = 1e-2

[train]
num_rollout = 2
micro_batch_size = 4

[optimizer]
lr = 1e-3

[checkpoint]
save_interval = 3

[eval]
datasets = [{{ name = "heldout", path = "prompts.jsonl" }}]
"""


def write_recipe(folder: Path, checkpoint: Path, text: str = RECIPE) -> Path:
    """Write the tiny recipe and its prompts into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"input": f"sign number {n}", "metadata": {"target": str(n)}} for n in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "tiny.toml"
    path.write_text(text.format(checkpoint=checkpoint))
    return path


def run_here(recipe: Path, run_dir: Path | None, *sets: str, resume: bool = False) -> list[str]:
    """Run a recipe in this process; return the lines it printed."""
    lines: list[str] = []
    run_recipe(
        recipe,
        sets=sets,
        run_dir=run_dir,
        resume=resume,
        catalog=Catalog.load(),
        echo=lines.append,
    )
    return lines


def start_run(recipe: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``drl run`` in a process of its own."""
    command = [sys.executable, "-m", "drl_cli", "run", str(recipe), "--run-dir", str(run_dir)]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def set_words(sets: Iterable[str]) -> list[str]:
    """Return settings as words of a command line."""
    return [word for setting in sets for word in ("--set", setting)]


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def without_trust(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leave parity out of rows: it is proven once per process, so a resume proves it again."""
    return [{k: v for k, v in row.items() if not k.startswith("trust/")} for row in rows]


def checkpoint_folder(run_dir: Path, iteration: int) -> Path:
    """Return the folder of the checkpoint after this many iterations."""
    return run_dir / "checkpoints" / f"iter_{iteration:07d}"


def trained_weights(run_dir: Path, iteration: int) -> dict[str, Tensor]:
    """Return the trainable parameters of a checkpoint by ``component.parameter``."""
    return read_weights(checkpoint_folder(run_dir, iteration))


def trainer_state(run_dir: Path, iteration: int) -> dict[str, Tensor]:
    """Return parameters and optimizer state of a checkpoint as one mapping."""
    folder = checkpoint_folder(run_dir, iteration)
    return read_whole(folder / "model") | read_whole(folder / "optimizer")


def last_saved(run_dir: Path) -> int:
    """Return the iteration that the tracker names."""
    return int((run_dir / "checkpoints" / TRACKER).read_text())


def final_state(run_dir: Path) -> dict[str, Tensor]:
    """Return every tensor of a run's newest checkpoint: parameters, optimizer, EMA, random states."""
    number = last_saved(run_dir)
    folder = checkpoint_folder(run_dir, number)
    ema = read_whole(folder / "ema") if (folder / "ema").is_dir() else {}
    tensors = trainer_state(run_dir, number)
    tensors |= {f"ema/{name}": tensor for name, tensor in ema.items()}
    for file in sorted((folder / "rng").iterdir()):
        tensors |= {f"rng/{file.stem}/{name}": value for name, value in load_file(file).items()}
    return tensors


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """True when two states have equal names and equal bits."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return summary.json."""
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result
