"""Shared pieces of the end-to-end tests: a tiny recipe, runs in this process and in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from drl.catalog import Catalog
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


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return summary.json."""
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result
