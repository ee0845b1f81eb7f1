"""``drl sample``: pictures of a pipeline, with or without an adapter, from fixed seeds.

It goes the way of a run's evaluation: the family plugin, the embedded engine, the deterministic sampler.
So the same seed and settings give the picture that an evaluation gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drl import __version__
from drl.cluster.background import Background
from drl.cluster.engines import InlineEngines
from drl.config.sections.model import ModelSection
from drl.config.sections.rollout import SdeSection
from drl.errors import BadInput
from drl.formats.adapter import Adapter, check_fits
from drl.formats.describe import describe
from drl.formats.layout import Layout, local_pipeline, pipeline_layout, read_index
from drl.formats.push import push_adapter
from drl.formats.read import read_adapter
from drl.formats.starts import needs_base, without_starts
from drl.formats.write import fresh
from drl.interfaces.engine import Launch
from drl.observe.files import read_json_lines, write_json_atomic
from drl.observe.pictures import SHEET, contact_sheet, printable, to_image, zoom
from drl.types import CheckpointFacts, Claim, Context, Prompt, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.interfaces.family import Family

ENGINE = "local"
INDEX = "samples.json"
INPUT_KEY = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to generate: every prompt with every seed; ``compare``: without and with the adapter.

    ``sampling`` must be that of a deterministic sampler. ``device`` "cpu" or "cuda", ``dtype`` "fp32",
    "bf16" or "fp16".
    """

    pipeline: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    out: Path
    adapter: Path | None = None
    compare: bool = False
    device: str = "cpu"
    dtype: str = "fp32"


@dataclass(frozen=True, slots=True)
class Picture:
    """One generated sample, and whether the adapter was in the model."""

    sample: Sample
    adapted: bool


def make_samples(wanted: Wanted, catalog: Catalog) -> Path:
    """Generate, and write pictures, contact sheet and ``samples.json`` to ``out``; returns the sheet.

    Raises BadInput, before the model is loaded, for an adapter that does not fit, a pipeline that no
    installed family claims, or an ``out`` that exists.
    """
    if wanted.out.exists():
        raise BadInput(f"--out {wanted.out} exists already; name a new folder")
    pictures, family = pictures_of(wanted, catalog)
    return write_pictures(wanted, pictures, family=family)


def pictures_of(wanted: Wanted, catalog: Catalog) -> tuple[list[Picture], str]:
    """Generate, without writing; returns the pictures and the name of the model family."""
    if wanted.compare and wanted.adapter is None:
        raise BadInput(
            "--compare sets pictures without and with an adapter side by side: add --adapter"
        )
    folder = local_pipeline(wanted.pipeline, "as PIPELINE")
    name = family_of(catalog, str(folder))
    adapter = _adapter(wanted.adapter, folder)
    with closing(Background()) as background:
        family, engines = _start(wanted, catalog, folder, name, background, adapter)
        with closing(engines):
            pictures: list[Picture] = []
            if adapter is None or wanted.compare:
                pictures += generate(wanted, family, engines, background, adapted=False)
            if adapter is not None:
                push_adapter(adapter, engines, folder)
                pictures += generate(wanted, family, engines, background, adapted=True)
    return pictures, name


def family_of(catalog: Catalog, checkpoint: str) -> str:
    """Return the family that claims a pipeline folder; BadInput when none or two do."""
    facts = CheckpointFacts(reference=checkpoint, model_index=read_index(Path(checkpoint)))
    answers = catalog.ask("drl_claim_checkpoint", {"checkpoint": facts})
    claims = [claim for _, claim in answers if isinstance(claim, Claim)]
    strongest = max(((one.by == "class", len(one.pattern)) for one in claims), default=None)
    winners = {c.family for c in claims if (c.by == "class", len(c.pattern)) == strongest}
    if len(winners) != 1:
        have = ", ".join(catalog.names("family")) or "none"
        raise BadInput(
            f"{' and '.join(sorted(winners)) or 'no installed family'} claims {checkpoint}; installed: {have}"
        )
    return winners.pop()


def _adapter(path: Path | None, folder: Path) -> Adapter | None:
    if path is None:
        return None
    layout: Layout = pipeline_layout(folder)
    adapter = read_adapter(path, layout=layout)
    check_fits(adapter, layout, path)
    return without_starts(adapter, folder) if needs_base(adapter) else adapter


def _start(
    wanted: Wanted,
    catalog: Catalog,
    folder: Path,
    name: str,
    background: Background,
    adapter: Adapter | None,
) -> tuple[Family, InlineEngines]:
    """Build family, SDE backend and engine through the catalog, and start the engine."""
    context = Context(device=wanted.device, dtype=wanted.dtype)
    section = ModelSection.model_validate({"checkpoint": str(folder)})
    model = replace(context, section=section)
    steps = SdeSection.model_validate(
        {"type": "ode", "noise_level": 0.0, "log_prob_no_const": True}
    )
    sde = replace(context, section=steps)
    family = catalog.create("family", name, _defaults(catalog, "family", name), model)
    strangers = sorted(set(adapter.components if adapter else ()) - set(family.components))
    if strangers:
        raise BadInput(
            f"the adapter changes {', '.join(strangers)}; drl samples with adapters of "
            f"{', '.join(family.components)} only. Leave those out with drl export --component"
        )
    backend = catalog.create("sde_backend", "ode", _defaults(catalog, "sde_backend", "ode"), sde)
    engine = catalog.create("engine", ENGINE, _defaults(catalog, "engine", ENGINE), context)
    engines = InlineEngines(ENGINE, engine, background)
    engines.start(
        Launch(
            checkpoint=str(folder),
            family=family,
            sde_backends={"ode": backend},
            components=family.components,
            device=wanted.device,
            dtype=wanted.dtype,
        )
    )
    return family, engines


def _defaults(catalog: Catalog, kind: str, name: str) -> Any:
    model = catalog.options_model(kind, name)
    return None if model is None else model()


def generate(
    wanted: Wanted,
    family: Family,
    engines: InlineEngines,
    background: Background,
    *,
    adapted: bool,
) -> list[Picture]:
    """Generate every prompt with every seed, prompt by prompt."""

    async def everything() -> list[Picture]:
        from drl.stages.together import together

        samples = await together(_one(engines, family.edit_request(r)) for r in requests_of(wanted))
        return [Picture(sample, adapted) for sample in samples]

    return background.run(everything())


async def _one(engines: InlineEngines, request: RolloutRequest) -> Sample:
    (sample,) = await engines.generate(request)
    return sample


def requests_of(wanted: Wanted) -> Iterator[RolloutRequest]:
    """Yield one deterministic request per picture, as an evaluation makes them."""
    for row, text in enumerate(wanted.prompts):
        for member, seed in enumerate(wanted.seeds):
            yield RolloutRequest(
                prompt=Prompt(row=row, text=text),
                group_index=row,
                members=(member,),
                seeds=(seed,),
                sampling=wanted.sampling,
                sde_steps=(),
                kept_latents=(),
                evaluation=True,
            )


def write_pictures(wanted: Wanted, pictures: Sequence[Picture], *, family: str) -> Path:
    """Write a PNG per picture, the contact sheet, and what was used; one row of the sheet per prompt.

    With ``compare`` each prompt has two rows, the upper one without the adapter.
    """
    ordered = sorted(pictures, key=lambda one: (one.sample.prompt.row, one.adapted))
    with fresh(wanted.out) as place:
        place.mkdir()
        tiles, index = [], []
        for number, one in enumerate(ordered):
            assert one.sample.media is not None  # engines always decode
            image = to_image(one.sample.media)
            file = f"{number:04d}.png"
            image.save(place / file)
            tiles.append((zoom(image), caption(one, named=wanted.compare)))
            index.append(_entry(file, one))
        rows = len(wanted.prompts) * (2 if wanted.compare else 1)
        contact_sheet(tiles, rows).save(place / SHEET)
        write_json_atomic(place / INDEX, {**facts_of(wanted, family), "pictures": index})
    return wanted.out / SHEET


def caption(picture: Picture, *, named: bool) -> str:
    """Return seed and prompt, with the row's own word when two rows are compared."""
    word = ("adapter  " if picture.adapted else "base  ") if named else ""
    return f"{word}{picture.sample.seed}  {printable(picture.sample.prompt.text)}"


def _entry(file: str, picture: Picture) -> Mapping[str, Any]:
    return {
        "file": file,
        "prompt": picture.sample.prompt.text,
        "seed": picture.sample.seed,
        "adapter": picture.adapted,
    }


def facts_of(wanted: Wanted, family: str) -> dict[str, Any]:
    """Return everything that decided the pictures."""
    adapter = None if wanted.adapter is None else describe(wanted.adapter)
    return {
        "pipeline": wanted.pipeline,
        "family": family,
        "engine": ENGINE,
        "adapter": adapter,
        "sampling": asdict(wanted.sampling),
        "device": wanted.device,
        "dtype": wanted.dtype,
        "versions": {"drl": __version__, "torch": torch.__version__},
    }


def read_prompts(file: Path) -> tuple[str, ...]:
    """Return the prompts of a file: one per line, or the ``input`` of each row of a ``.jsonl`` file."""
    try:
        if file.suffix != ".jsonl":
            found = [line.strip() for line in file.read_text("utf-8").splitlines()]
        else:
            rows, remarks = read_json_lines(file)
            if remarks or any(not isinstance(row.get(INPUT_KEY), str) for row in rows):
                raise BadInput(
                    f'{file}: every row must be a JSON object with a text "{INPUT_KEY}"; {remarks or rows[:1]}'
                )
            found = [row[INPUT_KEY] for row in rows]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"--prompts {file} cannot be read: {error}") from error
    prompts = tuple(line for line in found if line)
    if not prompts:
        raise BadInput(f"--prompts {file} has no prompt in it")
    return prompts
