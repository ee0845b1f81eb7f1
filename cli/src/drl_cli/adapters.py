"""``drl adapters show``, ``check``, ``diff`` and ``merge``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from drl.errors import BadInput
from drl_cli.warned import warned

if TYPE_CHECKING:
    from drl.formats.adapter import Adapter
    from drl.formats.layout import Layout

Source = click.Path(exists=True, path_type=Path)
base_option = click.option(
    "--base",
    metavar="PIPELINE",
    help="Pipeline folder or hub id of the base model; kohya and ComfyUI files need it.",
)
SHOWN = 20


@click.group()
def adapters() -> None:
    """Look at, check, compare and combine adapters of any format."""


@adapters.command()
@click.argument("path", type=Source)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--norms", is_flag=True, help="Also the norm of each update; reads the tensors.")
@base_option
def show(path: Path, as_json: bool, norms: bool, base: str | None) -> None:
    """Say what a file or folder is: format, ranks, alphas, scale, targets, dtype, size, metadata.

    Reads headers only, so that the size of a file does not matter. Knows PEFT (expert adapters of each
    era too), diffusers old and new, kohya, ComfyUI, pipelines, full weights, runs and checkpoints.

    \b
    Examples:
      drl adapters show runs/quickstart-20260801-120000/adapter
      drl adapters show downloaded.safetensors --json
    """
    from drl.formats.describe import describe
    from drl.formats.description import lines

    facts = describe(path)
    if norms:
        facts["norms"] = norms_of(path, base)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for line in lines(facts):
        click.echo(line)
    for name, value in facts.get("norms", {}).items():
        click.echo(f"  {value:12.6g}  {name}")


@adapters.command()
@click.argument("path", type=Source)
@base_option
def check(path: Path, base: str | None) -> None:
    """Check that an adapter is complete and finite and fits its base model; exit code 2 if not.

    Without --base, against the base that the adapter itself names, when that is a folder here.

    \b
    Examples:
      drl adapters check runs/quickstart-20260801-120000/adapter
      drl adapters check downloaded.safetensors --base models/sd35-medium
    """
    from drl.formats.check import problems_of
    from drl.formats.read import read_adapter

    with warned():
        layout = layout_of(base)
        if layout is None:
            named = own_base(path)
            layout = layout_of(named)
            base = named
        problems = problems_of(path, layout)
        if problems:
            raise BadInput(f"{path} has {len(problems)} problems\n  " + "\n  ".join(problems))
        adapter = read_adapter(path, layout=layout)
    count = sum(map(len, adapter.components.values()))
    against = f"fits {base}" if base else "not checked against a base model (--base)"
    click.echo(f"{path} is sound: {count} modules, finite, complete; {against}")


@adapters.command()
@click.argument("first", type=Source)
@click.argument("second", type=Source)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@base_option
def diff(first: Path, second: Path, as_json: bool, base: str | None) -> None:
    """Compare two adapters: how far each layer's update is apart, largest first.

    The formats may differ: what is compared is scale * B * A of every layer.

    \b
    Examples:
      drl adapters diff runs/a/adapter runs/b/adapter
      drl adapters diff runs/a/adapter a.safetensors --base models/sd35-medium
    """
    from drl.formats.compare import compare, strengths

    with warned():
        pair = [read_plain(path, base) for path in (first, second)]
    lines = compare(*pair)
    both = [strengths(adapter) for adapter in pair]
    if as_json:
        rows = [
            {**asdict(line), "relative": line.relative if math.isfinite(line.relative) else None}
            for line in lines
        ]
        facts = {"first": both[0], "second": both[1], "layers": rows}
        click.echo(json.dumps(facts, indent=2))
        return
    for key in both[0]:
        mark = "=" if both[0][key] == both[1][key] else "differs:"
        click.echo(f"{key:<8} {both[0][key]} {mark} {both[1][key]}")
    changed = [line for line in lines if line.relative > 0]
    click.echo(f"{len(changed)} of {len(lines)} layers differ")
    for line in changed[:SHOWN]:
        only = f"  (not in the {line.missing})" if line.missing else ""
        click.echo(f"  {line.relative:10.3g}  {line.component}.{line.path}{only}")
    if len(changed) > SHOWN:
        click.echo(f"  and {len(changed) - SHOWN} more (--json shows all)")


@adapters.command()
@click.argument("weighted", metavar="PATH:WEIGHT...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New PEFT folder.")
@click.option(
    "--method",
    type=click.Choice(("concat", "svd")),
    default="concat",
    show_default=True,
    help="concat: exact, ranks add up. svd: the nearest adapter of rank --rank.",
)
@click.option("--rank", type=click.IntRange(min=1), help="Rank of the result, for svd.")
@base_option
def merge(
    weighted: tuple[str, ...], out: Path, method: str, rank: int | None, base: str | None
) -> None:
    """Combine adapters into one: the sum of their updates, each times its weight (1 when absent).

    \b
    Examples:
      drl adapters merge style:0.7 text:0.3 --out both
      drl adapters merge a.safetensors:1 b --base models/sd35-medium --method svd --rank 16 --out c
    """
    from drl.formats.combine import combine, truncation_error
    from drl.formats.write import write_adapter

    with warned():
        parts = [
            (read_plain(path, base), weight)
            for path, weight in (split_weight(one) for one in weighted)
        ]
        combined = combine(parts, method=method, rank=rank)
        write_adapter(combined, "peft", out, layout_of(base))
    click.echo(f"{out}: {len(parts)} adapters by {method}")
    if method == "svd":
        exact = combine(parts, method="concat", rank=None)
        error = truncation_error(exact, combined)
        click.echo(f"  the layer that lost most is off by {error:.2g} of its norm")


def layout_of(base: str | None) -> Layout | None:
    """Return the layout of the base model, None when none is given."""
    if base is None:
        return None
    from drl.export import layout_of as read

    return read(base)


def own_base(path: Path) -> str | None:
    """Return the base that a PEFT adapter names, when it is a folder here."""
    from drl.formats.detect import Format, detect

    if detect(path) is not Format.PEFT:
        return None
    from drl.formats.peft_folder import read_peft_folder

    named = read_peft_folder(path).base_model
    return named if named is not None and Path(named).is_dir() else None


def read_plain(path: Path, base: str | None) -> Adapter:
    """Read an adapter as plain matrices: what it adds to the base, whatever it counts from."""
    from drl.formats.layout import local_pipeline
    from drl.formats.read import read_adapter
    from drl.formats.starts import needs_base, without_starts

    adapter = read_adapter(path, layout=layout_of(base))
    if not needs_base(adapter):
        return adapter
    reference = base or adapter.base_model
    if reference is None:
        raise BadInput(f"{path} counts from start values of its base model; give that with --base")
    return without_starts(adapter, local_pipeline(reference))


def norms_of(path: Path, base: str | None) -> dict[str, float]:
    """Return the norm of every update, largest first."""
    from drl.formats.compare import delta_norm

    with warned():
        adapter = read_plain(path, base)
    norms = {
        f"{component}.{name}": delta_norm(layer)
        for component, layers in adapter.components.items()
        for name, layer in layers.items()
    }
    return dict(sorted(norms.items(), key=lambda item: -item[1]))


def split_weight(text: str) -> tuple[Path, float]:
    """Split ``PATH:WEIGHT``; a path without a weight has weight 1."""
    name, colon, number = text.rpartition(":")
    if colon and not Path(text).exists():
        try:
            weight = float(number)
        except ValueError:
            raise BadInput(f"{text}: {number!r} is no number; write PATH:0.7") from None
        if not math.isfinite(weight):
            raise BadInput(f"{text}: the weight must be a finite number")
    else:
        name, weight = text, 1.0
    if not Path(name).exists():
        raise BadInput(f"there is no file or folder {name}")
    return Path(name), weight
