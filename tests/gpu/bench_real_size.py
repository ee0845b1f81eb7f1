"""A run at real size: Stable Diffusion 3.5 Medium's shapes at 512 x 512, adapters of rank 32, bf16.

Not collected by itself: ``pytest tests/gpu/bench_real_size.py``. ``DRL_GPU_BENCH`` adds settings to its
recipe, separated by blanks. On the CPU the same with a small model.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from gpu.facts import record
from gpu.pipelines import CLIP_TOKENS, MEDIUM, SMALL, T5_TOKENS, write_pipeline
from gpu.runs import free, open_run, pairs_of, roll_out, size_spread

from drl.api import Need, RowShape
from drl.loop import train
from drl.observe.memory import memory_of
from drl.observe.metrics import read_metrics
from drl.observe.timing import phases_of
from drl.run import Run
from drl.stages.pairs import batch_plan

pytestmark = pytest.mark.gpu

ITERATIONS = 2
RECIPE = """
[model]
checkpoint = "{checkpoint}"

[lora]
enabled = true
rank = 32
alpha = 64

[cluster]
device = "{device}"

[data]
prompt_data = "prompts.jsonl"

[sampling]
num_steps = 10
width = {side}
height = {side}
guidance_scale = 1.0

[rollout]
batch_size = 2
n_samples_per_prompt = 8
microgroup_size = 8

[rollout.local]
rows = 8

[reward]
type = "jpeg"

{objective}

[train]
num_rollout = {iterations}
micro_batch_size = 8
forward_dtype = "bf16"

[optimizer]
lr = 1e-4

[checkpoint]
every_minutes = 60
"""

OBJECTIVES = {
    "policy_loss": """
[sde]
type = "sde"
step_strategy = "sde_window"
num_steps = 2

[sde.sde_window]
range = [0, 5]

[algorithm.policy_loss]
clip_range = 1e-3
""",
    "nft": """
[sde]
type = "ode"
step_strategy = "ode_and_return_last"

[algorithm]
loss = "nft"
ref_mode = "ema"

[ema]
enabled = true
""",
}
"""Flow-GRPO trains on 2 of 10 steps; DiffusionNFT, as it comes, on 9 noise levels of each sample."""


def gib(count: int) -> float:
    """Return bytes as GiB."""
    return round(count / 2**30, 2)


def memory() -> dict[str, float]:
    """Return what the device's allocator holds now; nothing on the CPU."""
    if not torch.cuda.is_available():
        return {}
    return {"now_gib": gib(torch.cuda.memory_allocated())}


def row_work(run: Run, side: int) -> tuple[float, float]:
    """Return the TFLOP of a row's prediction, and of training on it: its gradient to the adapters too."""
    checkpoint = run.recipe.model.checkpoint
    config = run.family.component_config("transformer", checkpoint)
    tokens = CLIP_TOKENS + T5_TOKENS
    shape = RowShape(latent=(16, side // 8, side // 8), text_tokens=tokens)
    flops = run.family.flops("transformer", config, shape)
    assert flops is not None
    branches = 2 if run.recipe.sampling.guidance_scale > 1 else 1
    both = flops.training(frozen=True)
    if Need.OLD_PREDICTION in run.loss.needs:
        both += flops.forward
    return branches * flops.forward / 1e12, branches * both / 1e12


def take_times(run: Run, side: int) -> None:
    """Record the figures of every iteration, from the run's own metrics."""
    samples = run.recipe.rollout.batch_size * run.recipe.rollout.n_samples_per_prompt
    pairs = samples * batch_plan(run.recipe).pairs_per_sample
    forward, step = row_work(run, side)
    calls = samples * run.recipe.sampling.num_steps
    for number, row in read_metrics(run.directory.metrics).rows.items():
        seconds = phases_of(row)
        record(
            f"{run.recipe.algorithm.loss} iteration {number + 1}",
            images_per_s=round(samples / seconds["rollout"], 2),
            rollout_tflop_per_s=round(calls * forward / seconds["rollout"], 1),
            pairs_per_s=round(pairs / seconds["train"], 2),
            train_tflop_per_s=round(pairs * step / seconds["train"], 1),
            seconds={name: round(took, 2) for name, took in seconds.items()},
            step_seconds=round(row["perf/step_time"], 2),
            grad_norm=row["train/grad_norm"],
            loss=row["train/loss"],
            ratio_abs_minus_1=row.get("train/ratio_abs_minus_1"),
            peak_gib={name: round(size, 2) for name, size in memory_of(row, peak=True).items()},
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    """Write the pipeline once for all runs."""
    folder = tmp_path_factory.mktemp("real-size") / "pipeline"
    began = time.perf_counter()
    write_pipeline(folder, SMALL if device == "cpu" else MEDIUM, device=device, seed=0)
    free()
    record("real size", write_s=round(time.perf_counter() - began, 1))
    return folder


@pytest.mark.parametrize("loss", OBJECTIVES)
def test_a_run_at_real_size(tmp_path: Path, device: str, checkpoint: Path, loss: str) -> None:
    on_gpu = device != "cpu"
    side = 512 if on_gpu else 64
    written = time.perf_counter()
    rows = [{"input": f"a sign that says {n}", "metadata": {}} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "real-size.toml"
    recipe.write_text(
        RECIPE.format(
            checkpoint=checkpoint,
            device=device,
            side=side,
            iterations=ITERATIONS,
            objective=OBJECTIVES[loss],
        )
    )
    sets = os.environ.get("DRL_GPU_BENCH", "").split()
    with open_run(recipe, tmp_path / "run", *sets) as run:
        started = time.perf_counter()
        parameters = sum(p.numel() for p in run.components["transformer"].module.parameters())
        record(
            f"real size, {loss}",
            model=f"{parameters / 1e6:.0f} M parameters",
            picture=f"{side} x {side}",
            settings=" ".join(sets),
            start_s=round(started - written, 1),
        )
        record(f"memory after start, {loss}", **memory())
        train(run)
        record(f"memory after training, {loss}", **memory())
        take_times(run, side)
        if loss != "policy_loss":
            return  # nothing of it is compared with what the engine computed
        assert run.parity is not None
        record(
            "real size",
            parity=run.parity.worst,
            parity_by_step=run.parity.by_step,
            limit=run.recipe.trust.max_log_prob_diff,
        )
        look_again(run)


def look_again(run: Run) -> None:
    """Record parity of merged adapters, and what the micro-batch size changes, on a fresh rollout."""
    _, shards = roll_out(run, rollout_id=ITERATIONS)
    report = run.trainer.replay(shards)
    record("real size", parity_after_training=report.worst, by_step_after_training=report.by_step)
    pairs = pairs_of(shards)[:16]
    spread = size_spread(run, pairs, (1, 2, 4, 8, 16))
    record("micro-batch spread real size", **{str(rows): far for rows, far in spread.items()})
    limit = run.recipe.trust.max_log_prob_diff
    assert report.worst <= limit, "merged adapters and applied adapters are too far apart"
    assert max(spread.values()) <= limit, "the micro-batch size changes more than the limit allows"
