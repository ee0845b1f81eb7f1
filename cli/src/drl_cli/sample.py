"""``drl sample``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from drl.errors import BadInput
from drl_cli.session import Session
from drl_cli.warned import warned

ARGUMENTS = {
    "model.checkpoint": "PIPELINE",
    "sampling.width": "--size, width",
    "sampling.height": "--size, height",
}
"""What a recipe calls the arguments of this command that a checkpoint can refuse."""


@click.command()
@click.argument("pipeline")
@click.option(
    "--adapter", type=click.Path(exists=True, path_type=Path), help="Adapter of any format."
)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt. Repeatable.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='One prompt per line, or rows {"input": …} in a .jsonl file.',
)
@click.option(
    "--seeds", default="0", show_default=True, metavar="0,1,2", help="A picture for each."
)
@click.option("--steps", type=click.IntRange(1, 10_000), default=28, show_default=True)
@click.option("--guidance", type=float, default=1.0, show_default=True, help="1: no guidance.")
@click.option("--size", default="512x512", show_default=True, metavar="WxH", help="In pixels.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("samples"),
    show_default=True,
    help="New folder.",
)
@click.option("--compare", is_flag=True, help="Rows without and with the adapter, same seeds.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="cuda where there is a GPU.")
@click.option(
    "--dtype", type=click.Choice(("fp32", "bf16", "fp16")), help="bf16 on a GPU, fp32 on a CPU."
)
@click.pass_obj
def sample(
    session: Session,
    pipeline: str,
    adapter: Path | None,
    prompts: tuple[str, ...],
    file: Path | None,
    seeds: str,
    steps: int,
    guidance: float,
    size: str,
    out: Path,
    compare: bool,
    device: str | None,
    dtype: str | None,
) -> None:
    """Generate pictures from fixed seeds: a contact sheet, each picture, and what was used as JSON.

    PIPELINE is a diffusers folder or a hub id. The sampler is that of a run's evaluation: the same seed
    and settings give the same picture.

    \b
    Examples:
      drl sample models/glyphs --prompt "sign 42" --steps 6 --size 48x16 --out before
      drl sample models/glyphs --adapter runs/a/adapter --prompts held-out.txt --seeds 0,1,2 --compare
    """
    width, height = size_of(size)
    numbers = seeds_of(seeds)
    import torch

    from drl.model.devices import check_device
    from drl.sample import Wanted, make_samples, read_prompts
    from drl.types import Sampling

    if (file is None) == (not prompts):
        raise BadInput("give prompts with --prompt, or with --prompts FILE, and not both")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device("--device", place)
    with warned(), own_names():
        sheet = make_samples(
            Wanted(
                pipeline=pipeline,
                prompts=prompts if file is None else read_prompts(file),
                seeds=numbers,
                sampling=Sampling(
                    num_steps=steps,
                    width=width,
                    height=height,
                    guidance_scale=guidance,
                    log_prob_no_const=True,
                    generator_device=place,
                ),
                out=out,
                adapter=adapter,
                compare=compare,
                device=place,
                dtype=dtype or ("fp32" if place == "cpu" else "bf16"),
            ),
            session.catalog,
        )
    click.echo(sheet)


@contextmanager
def own_names() -> Iterator[None]:
    """Let errors of a block name the arguments of this command instead of a recipe's options."""
    try:
        yield
    except BadInput as error:
        text = str(error)
        for option, argument in ARGUMENTS.items():
            text = text.replace(option, argument)
        if text == str(error):
            raise
        raise BadInput(text) from error


def size_of(text: str) -> tuple[int, int]:
    """Return width and height of ``WxH``."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None:
        raise BadInput(f"--size {text}: write width x height in pixels, such as 1024x768")
    return int(match[1]), int(match[2])


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds of ``0,1,2``."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,10}\s*", part) and int(part) < 2**31 for part in parts):
        raise BadInput(f"--seeds {text}: write whole numbers below 2147483648 with commas: 0,1,2")
    return tuple(map(int, parts))
