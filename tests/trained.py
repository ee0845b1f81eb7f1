"""A tiny pipeline and an adapter trained on it by a real run; pictures of both, by drl and by diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from e2e import run_here, write_recipe

from drl.catalog import Catalog
from drl.sample import Wanted, pictures_of
from drl.types import Sampling
from drl_family_sd3.tiny import build_random

SEED = 11
PROMPT = "sign number 1"
SIDE, STEPS = 32, 4
SAMPLING = Sampling(
    num_steps=STEPS, height=SIDE, width=SIDE, log_prob_no_const=True, generator_device="cpu"
)
# A large learning rate, so that a wrong strength could not hide in rounding.
TRAINING = ("optimizer.lr=0.05", "train.num_rollout=2", "checkpoint.save_interval=1")


def build_pipeline(folder: Path) -> Path:
    """Write the tiny pipeline."""
    build_random(folder, seed=0)
    return folder


def train(folder: Path, pipeline: Path, *sets: str) -> Path:
    """Train on the pipeline and return the run directory."""
    recipe = write_recipe(folder, pipeline)
    run_here(recipe, folder / "run", *TRAINING, *sets)
    return folder / "run"


def drl_pixels(
    pipeline: Path, adapter: Path | None = None, *, sampling: Sampling = SAMPLING
) -> torch.Tensor:
    """Return the picture (3, H, W) that ``drl sample`` makes, before it is rounded to 8 bits."""
    wanted = Wanted(
        pipeline=str(pipeline),
        prompts=(PROMPT,),
        seeds=(SEED,),
        sampling=sampling,
        out=Path("unused"),
        adapter=adapter,
    )
    (picture,), _ = pictures_of(wanted, Catalog.load())
    assert picture.sample.media is not None
    return picture.sample.media.pixels[:, 0]


def diffusers_pipeline(folder: Path) -> Any:
    """Load a pipeline as a user of diffusers does."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def diffusers_pixels(pipe: Any) -> torch.Tensor:
    """Return the picture (3, H, W) of a diffusers pipeline from the same noise."""
    channels = pipe.transformer.config.in_channels
    side = SIDE // pipe.vae_scale_factor
    noise = torch.randn((1, channels, side, side), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        made: torch.Tensor = pipe(
            PROMPT,
            latents=noise,
            height=SIDE,
            width=SIDE,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            max_sequence_length=pipe.tokenizer_3.model_max_length,
            output_type="pt",
        ).images[0]
    return made


def far(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference of two pictures."""
    return float((left - right).abs().max())
