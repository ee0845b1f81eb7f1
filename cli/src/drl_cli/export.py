"""``drl export``."""

from __future__ import annotations

from pathlib import Path

import click

from drl_cli.warned import warned

FORMATS = ("peft", "diffusers", "kohya", "comfy", "merged")
Source = click.Path(exists=True, path_type=Path)
Target = click.Path(path_type=Path)


@click.command()
@click.argument("source", type=Source)
@click.option("--format", "name", type=click.Choice(FORMATS), required=True, help="What to write.")
@click.option(
    "--out", type=Target, required=True, help="New file (kohya, comfy: *.safetensors) or folder."
)
@click.option("--component", metavar="NAME", help="Export only this component.")
@click.option(
    "--dtype",
    type=click.Choice(("fp32", "bf16", "fp16")),
    help="Precision of what is written; that of the source (merged: of the base) when absent.",
)
@click.option(
    "--baked", is_flag=True, help="Put the scale into B and make alpha the rank, for any reader."
)
@click.option("--step", type=int, metavar="N", help="The run's checkpoint after N iterations.")
@click.option("--ema", is_flag=True, help="The averaged weights of a run with ema.enabled.")
@click.option(
    "--base",
    metavar="PIPELINE",
    help="Pipeline folder or hub id of the base model; the one that SOURCE names when absent.",
)
@click.option(
    "--link",
    is_flag=True,
    help="merged: hard links to the base's unchanged files, which saves space; copies when absent.",
)
def export(
    source: Path,
    name: str,
    out: Path,
    component: str | None,
    dtype: str | None,
    baked: bool,
    step: int | None,
    ema: bool,
    base: str | None,
    link: bool,
) -> None:
    """Write trained weights in the format of another tool.

    SOURCE is a run directory (its newest checkpoint, or --step), a checkpoint, or an adapter of any
    format. Nothing is overwritten, and the export is read again and compared before it appears.

    \b
    peft       folder for peft, and for diffusers pipelines
    diffusers  pytorch_lora_weights.safetensors, for pipe.load_lora_weights
    kohya      one file for sd-scripts, ComfyUI and others, with alpha
    comfy      one file with keys diffusion_model., for ComfyUI
    merged     a whole pipeline with the weights in it, for DiffusionPipeline.from_pretrained

    \b
    Examples:
      drl export runs/quickstart-20260801-120000 --format kohya --out sign.safetensors
      drl export runs/quickstart-20260801-120000 --format merged --out merged --dtype bf16
    """
    from drl.export import Wanted
    from drl.export import export as write

    with warned():
        done = write(
            Wanted(
                source=source,
                format=name,
                out=out,
                component=component,
                dtype=dtype,
                baked=baked,
                step=step,
                ema=ema,
                base=base,
                link=link,
            )
        )
    click.echo(
        f"{done.path}: {name}, {done.modules} modules, from {done.origin}; read again, equal"
    )
    for note in done.notes:
        click.echo(f"  {note}")
