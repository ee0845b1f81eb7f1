"""A rollout through the product against a plain diffusers pipeline and against the transformer alone.

``python benchmarks/rollout.py`` makes one group of pictures with guidance by each of them, in turns, and
prints pictures a second and the ratio to the transformer's own time. The product's rollout is that of a run:
requests, prompts, noise, trajectory, log-probs, pictures on the CPU; no reward beyond the size of a JPEG.
``--rows 1 --graphs`` shows what CUDA graphs gain where a forward is small.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    SCALES,
    Row,
    Scale,
    arguments,
    free,
    in_rounds,
    inputs,
    report,
    transformer,
    wall_milliseconds,
)
from diffusers import StableDiffusion3Pipeline
from gpu.pipelines import MEDIUM, SMALL, write_pipeline
from gpu.runs import open_run
from torch import nn

from drl.stages.collect import collect

GUIDANCE = 4.5
PROMPT = "a sign that says hello"
RECIPE = """
[model]
checkpoint = "{checkpoint}"

[model.sd3]
vae_dtype = "{dtype}"
compile_vae = {compile}

[lora]
enabled = true
rank = {rank}
alpha = 64

[cluster]
device = "{device}"

[data]
prompt_data = "prompts.jsonl"

[sampling]
num_steps = {steps}
width = {side}
height = {side}
guidance_scale = {guidance}

[sde]
type = "sde"
num_steps = 2

[rollout]
batch_size = {groups}
n_samples_per_prompt = {rows}
microgroup_size = {rows}

[rollout.local]
rows = {rows}
compile = {compile}
cuda_graphs = {graphs}
weights = "shared"

[reward]
type = "jpeg"

[train]
num_rollout = 1
micro_batch_size = {rows}
forward_dtype = "{dtype}"

[algorithm.policy_loss]
clip_range = 1e-3
"""


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--groups", type=int, default=1, help="prompts of the product's rollout")
    parser.add_argument("--rows", type=int, help="pictures of a batch (8; 2 for size small)")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument(
        "--graphs", action="store_true", help="the product's rollout with CUDA graphs too"
    )
    options = parser.parse_args()
    options.scale = SCALES[options.size]
    if options.rows is not None:
        options.scale = replace(options.scale, batch=options.rows)
    options.dtype = "bf16" if options.device.startswith("cuda") else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        report("rollout", options, [*measure(options, Path(folder))])


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Return a row per way to make pictures; medians over turns."""
    size = MEDIUM if options.size == "medium" else SMALL
    write_pipeline(folder / "pipeline", size, device=options.device, seed=0)
    free()
    scale: Scale = options.scale
    with ExitStack() as stack:
        ways: dict[str, tuple[int, Callable[[], object]]] = {
            "transformer alone": (scale.batch, alone(options)),
            "product": (scale.batch * options.groups, stack.enter_context(opened(options, folder))),
            "diffusers, eager": (scale.batch, plain(options, folder, compiled=False)),
        }
        if options.graphs:
            graphed = stack.enter_context(opened(options, folder, graphs=True))
            ways["product, CUDA graphs"] = (scale.batch * options.groups, graphed)
        if not options.eager:
            works = plain(options, folder, compiled=True)
            ways["diffusers, compiled blocks"] = (scale.batch, works)
        found = in_rounds(
            {name: work for name, (_, work) in ways.items()},
            options.device,
            repeats=options.repeats,
            warmup=options.warmup,
            timed=wall_milliseconds,
        )
    seconds = {name: spent / 1e3 for name, spent in found.items()}
    limit = seconds["transformer alone"] / scale.batch
    return [
        {
            "way": name,
            "pictures": count,
            "seconds": seconds[name],
            "pictures/s": count / seconds[name],
            "share of the transformer alone": limit * count / seconds[name],
        }
        for name, (count, _) in ways.items()
    ]


def alone(options: argparse.Namespace) -> Callable[[], object]:
    """Return all forwards of a batch with guidance: the rows twice, once for each prediction."""
    scale: Scale = options.scale
    model = transformer(scale, options.device, torch.bfloat16).requires_grad_(False)
    if not options.eager:
        compile_blocks(model)
    given = {
        name: torch.cat([value, value]) if isinstance(value, torch.Tensor) else value
        for name, value in inputs(scale, options.device, torch.float32).items()
    }
    kind = options.device.partition(":")[0]

    def work() -> None:
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16):
            for _ in range(options.steps):
                model(**given)

    return work


def compile_blocks(model: nn.Module) -> None:
    """Compile block by block, as the product does."""
    torch._dynamo.config.recompile_limit = 64
    for block in model.transformer_blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)  # type: ignore[operator]


def plain(options: argparse.Namespace, folder: Path, *, compiled: bool) -> Callable[[], object]:
    """Return a call of diffusers' own pipeline, pictures as tensors on the CPU."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(folder / "pipeline", dtype=dtype)
    pipeline.to(options.device)
    pipeline.set_progress_bar_config(disable=True)
    if compiled:
        compile_blocks(pipeline.transformer)
    scale: Scale = options.scale

    def work() -> None:
        images = pipeline(
            PROMPT,
            num_images_per_prompt=scale.batch,
            num_inference_steps=options.steps,
            guidance_scale=GUIDANCE,
            height=8 * scale.side,
            width=8 * scale.side,
            max_sequence_length=scale.tokens - 77 if options.size == "medium" else 77,
            output_type="pt",
        ).images
        images.float().cpu()

    return work


@contextmanager
def opened(
    options: argparse.Namespace, folder: Path, *, graphs: bool = False
) -> Iterator[Callable[[], object]]:
    """Open a run; yield a call that makes its rollout."""
    scale: Scale = options.scale
    rows = [{"input": f"{PROMPT} {number}", "metadata": {}} for number in range(options.groups)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "rollout.toml"
    recipe.write_text(
        RECIPE.format(
            checkpoint=folder / "pipeline",
            dtype=options.dtype,
            device=options.device,
            steps=options.steps,
            side=8 * scale.side,
            rank=scale.rank,
            guidance=GUIDANCE,
            groups=options.groups,
            rows=scale.batch,
            compile=str(not options.eager).lower(),
            graphs=str(graphs).lower(),
        )
    )
    with open_run(recipe, folder / f"run{'-graphs' * graphs}") as run:
        yield lambda: collect(run, 0)


if __name__ == "__main__":
    main()
