"""``drl export``: the trained weights of a run, a checkpoint or an adapter, in a format of other tools.

``weights_of`` finds out what there is to export; ``export`` writes it. Nothing is ever overwritten, and
every export is read again and compared before it appears.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from drl.checkpoint.dcp import read_whole
from drl.checkpoint.folders import checkpoints_in, latest
from drl.checkpoint.manifest import damage
from drl.errors import BadInput, CheckpointError
from drl.formats.adapter import Adapter, baked, check_fits, converted, layers_of_state, only
from drl.formats.detect import Format, detect, peft_folders
from drl.formats.layout import Layout, boundary_ratio, local_pipeline, pipeline_layout
from drl.formats.merged import Change, changes_of, write_pipeline
from drl.formats.names import ORIGINAL_NAMES
from drl.formats.peft_folder import read_peft_folder
from drl.formats.read import read_adapter
from drl.formats.starts import needs_base, without_starts
from drl.formats.write import ADAPTER_FORMATS, write_adapter
from drl.lora import LoraConfig, LoraError, to_plain_name
from drl.lora.init import BASE_SCHEMES
from drl.lora.naming import adapter_key, split_adapter_key
from drl.lora.peft_config import read_config
from drl.mathematics.feeding import DTYPES
from drl.observe.directory import RunDirectory

MERGED = "merged"
EXPORT_FORMATS = (*ADAPTER_FORMATS, MERGED)
MODEL, EMA = "model", "ema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What was trained. ``adapter`` is None for a full-weights run, whose tensors are in ``dense``.

    ``dense``: trained tensors by component and plain name. ``origin``: where they come from, for people.
    """

    adapter: Adapter | None = None
    dense: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    base_model: str | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to export and how.

    ``format``: one of EXPORT_FORMATS. ``component``: only this one. ``dtype``: "fp32", "bf16", "fp16" or
    None to keep it. ``baked``: put the scale into B. ``step``: iteration of a run's checkpoint. ``ema``:
    the averaged weights. ``base``: pipeline, when it is not the one that the source names. ``link``:
    merged only, hard links for what did not change.
    """

    source: Path
    format: str
    out: Path
    component: str | None = None
    dtype: str | None = None
    baked: bool = False
    step: int | None = None
    ema: bool = False
    base: str | None = None
    link: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and ``notes``: what to know when loading it."""

    path: Path
    origin: str
    modules: int
    notes: tuple[str, ...] = ()


def export(wanted: Wanted) -> Exported:
    """Write the export; BadInput for anything that cannot be done, before anything is written."""
    if wanted.out.exists() or wanted.out.is_symlink():
        raise BadInput(
            f"--out {wanted.out} exists already; name a new path, nothing is overwritten"
        )
    layout = layout_of(wanted.base) if wanted.base is not None else None
    weights = weights_of(
        wanted.source,
        step=wanted.step,
        ema=wanted.ema,
        layout=layout,
        component=wanted.component,
    )
    reference = wanted.base or weights.base_model
    if weights.adapter is None:
        return _export_dense(wanted, weights, reference)
    if layout is None and reference is not None and _is_needed(wanted.format, reference):
        layout = layout_of(reference)
    adapter = _prepared(wanted, weights.adapter, reference)
    if layout is not None:
        check_fits(adapter, layout, wanted.source)
    if wanted.format == MERGED:
        return _export_merged(wanted, weights, changes_of(adapter), reference)
    write_adapter(adapter, wanted.format, wanted.out, layout)
    return Exported(
        path=wanted.out,
        origin=weights.origin,
        modules=sum(map(len, adapter.components.values())),
        notes=tuple(notes_of(wanted, adapter, layout)),
    )


def layout_of(reference: str) -> Layout:
    """Return the layout of a base model by the reference that a user or a config gives."""
    return pipeline_layout(local_pipeline(reference))


def _is_needed(name: str, reference: str) -> bool:
    """Formats with other module names need the base; the others are checked against one at hand."""
    return name not in ("peft", "diffusers") or Path(reference).expanduser().is_dir()


def _prepared(wanted: Wanted, adapter: Adapter, reference: str | None) -> Adapter:
    chosen = only(adapter, wanted.component)
    if needs_base(chosen):
        chosen = without_starts(chosen, local_pipeline(_named(wanted, reference)))
    if wanted.format != MERGED and wanted.dtype is not None:
        chosen = converted(chosen, DTYPES[wanted.dtype])
    if wanted.baked:
        if wanted.format == MERGED:
            raise BadInput("--baked is for adapters; a merged pipeline has no scale left")
        chosen = baked(chosen)
    boundary = chosen.boundary_ratio
    if boundary is None and len(chosen.components) > 1 and reference is not None:
        folder = Path(reference).expanduser()
        boundary = boundary_ratio(folder) if folder.is_dir() else None
    return replace(chosen, base_model=reference, boundary_ratio=boundary)


def _export_dense(wanted: Wanted, weights: Weights, reference: str | None) -> Exported:
    if wanted.format != MERGED:
        raise BadInput(
            f"{wanted.source} trained full weights, there is no adapter in it; use --format {MERGED}"
        )
    chosen = weights.dense
    if wanted.component is not None:
        if wanted.component not in chosen:
            raise BadInput(f"--component {wanted.component}: the run trained {', '.join(chosen)}")
        chosen = {wanted.component: chosen[wanted.component]}
    changes = {name: Change(tensors=tensors) for name, tensors in chosen.items()}
    return _export_merged(wanted, weights, changes, reference)


def _export_merged(
    wanted: Wanted, weights: Weights, changes: Mapping[str, Change], reference: str | None
) -> Exported:
    counts = {name: len(one.layers) + len(one.tensors) for name, one in changes.items()}
    write_pipeline(
        local_pipeline(_named(wanted, reference)),
        changes,
        wanted.out,
        dtype=DTYPES[wanted.dtype] if wanted.dtype else None,
        link=wanted.link,
        origin={"from": weights.origin, "base": reference, "changed": counts},
    )
    return Exported(path=wanted.out, origin=weights.origin, modules=sum(counts.values()))


def _named(wanted: Wanted, reference: str | None) -> str:
    if reference is None:
        raise BadInput(
            f"{wanted.source} does not say which base model it belongs to; give its pipeline with --base"
        )
    return reference


def notes_of(wanted: Wanted, adapter: Adapter, layout: Layout | None) -> list[str]:
    """Return what a user of the file must know: how to load it, and who cannot."""
    if wanted.format == "diffusers":
        lines = [f"load it with pipe.load_lora_weights({str(wanted.out)!r})"]
        lines += [
            f"component '{name}': pipe.{name}.load_lora_adapter(FILE, prefix={name!r})"
            for name in adapter.components
            if name not in ("transformer", "unet", "text_encoder", "text_encoder_2")
        ]
        return lines
    if wanted.format == "peft":
        return []
    classes = {name: layout[name].class_name for name in adapter.components} if layout else {}
    own = [name for name, kind in classes.items() if kind not in ORIGINAL_NAMES]
    if own:
        return [
            f"{', '.join(own)}: drl knows no original names for {classes[own[0]]}, so the file has those "
            "of diffusers; check that the other tool reads them"
        ]
    return ["diffusers converts such files for some models only, not for Stable Diffusion 3"]


def weights_of(
    source: Path,
    *,
    step: int | None = None,
    ema: bool = False,
    layout: Layout | None = None,
    component: str | None = None,
) -> Weights:
    """Return what was trained in a run directory, a checkpoint or an adapter of any format.

    A run gives its newest checkpoint, or that after ``step`` iterations; ``ema`` its averaged weights.
    ``layout``: of the base model, for formats that need it to be read. Raises BadInput, or
    CheckpointError naming the damage.
    """
    found = detect(source)
    if found is Format.RUN:
        return _weights_of_run(source, step, ema=ema)
    if found is Format.CHECKPOINT:
        _refuse("--step", step is not None, "a checkpoint is one step already")
        return _weights_of_checkpoint(source, source.resolve().parent.parent, ema=ema)
    _refuse("--step", step is not None, f"{source} is a {found}, not a run")
    _refuse("--ema", ema, f"{source} is a {found}, not a run or checkpoint")
    adapter = read_adapter(source, layout=layout, component=component)
    return Weights(adapter=adapter, base_model=adapter.base_model, origin=str(source))


def _refuse(option: str, given: bool, reason: str) -> None:
    if given:
        raise BadInput(f"{option}: {reason}")


def _weights_of_run(run: Path, step: int | None, *, ema: bool) -> Weights:
    directory = RunDirectory.open(run)
    recipe = _recipe(run)
    chosen = recipe.get("checkpoint", {}).get("save")
    root = directory.checkpoints if chosen is None else Path(chosen)
    there = checkpoints_in(root)
    if step is not None:
        if step not in there:
            have = ", ".join(map(str, there)) or "none"
            raise BadInput(f"--step {step}: {root} has checkpoints after {have} iterations")
        return _weights_of_checkpoint(there[step], run, ema=ema)
    if there:
        return _weights_of_checkpoint(latest(root), run, ema=ema)
    if not directory.adapter.is_dir() or not peft_folders(directory.adapter) or ema:
        raise BadInput(f"{run} has no checkpoint yet; let the run save one")
    adapter = read_peft_folder(directory.adapter)
    return Weights(adapter=adapter, base_model=adapter.base_model, origin=f"{directory.adapter}")


def _weights_of_checkpoint(folder: Path, run: Path, *, ema: bool) -> Weights:
    problem = damage(folder)
    if problem:
        raise CheckpointError(f"{folder} cannot be used: {problem}; choose another with --step")
    part = folder / (EMA if ema else MODEL)
    if not part.is_dir():
        raise BadInput(
            f"{folder} holds no averaged weights (the run had ema.enabled = false); leave out --ema"
            if ema
            else f"{folder} holds no {MODEL}/; it is no checkpoint of this version"
        )
    by_component: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in read_whole(part).items():
        component, _, rest = name.partition(".")
        by_component[component][rest] = tensor
    origin = f"{folder}{' (averaged)' if ema else ''}"
    base_model = _recipe(run).get("model", {}).get("checkpoint")
    if not any(split_adapter_key(name) for tensors in by_component.values() for name in tensors):
        dense = {
            component: {to_plain_name(name): tensor for name, tensor in tensors.items()}
            for component, tensors in by_component.items()
        }
        return Weights(dense=dense, base_model=base_model, origin=origin)
    adapter = _adapter_of(by_component, run, folder)
    return Weights(
        adapter=replace(adapter, base_model=base_model), base_model=base_model, origin=origin
    )


def _adapter_of(
    by_component: Mapping[str, Mapping[str, Tensor]], run: Path, folder: Path
) -> Adapter:
    components, configs, others = {}, {}, {}
    for component, tensors in by_component.items():
        config = _config_of_run(run, component, folder, several=len(by_component) > 1)
        components[component], rest = layers_of_state(state_of_live(tensors), config)
        configs[component] = config
        if rest:
            others[component] = rest
    return Adapter(components=components, configs=configs, others=others)


def state_of_live(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained tensors, named as in the model, by key of a PEFT file."""
    adapted = {
        to_plain_name(found[0]) for found in map(split_adapter_key, tensors) if found is not None
    }
    return {_file_key(name, adapted): tensor for name, tensor in tensors.items()}


def _file_key(name: str, adapted: Collection[str]) -> str:
    found = split_adapter_key(name)
    if found is not None:
        return adapter_key(to_plain_name(found[0]), found[1])
    parts = to_plain_name(name).split(".")
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        return ".".join([*parts[:place], *parts[place + 2 :]])  # without the adapter's name
    owner = ".".join(parts[:-2])
    if parts[-2:-1] == ["lora_bias"]:
        return f"{owner}.base_layer.bias" if owner in adapted else f"{owner}.bias"
    if parts[-2:-1] in (["lora_embedding_A"], ["lora_embedding_B"]):
        return ".".join(parts[:-1])
    return ".".join(parts)


def _config_of_run(run: Path, component: str, folder: Path, *, several: bool) -> LoraConfig:
    """Return what the run's adapters were injected with.

    The adapter that a run writes is always plain; one that counts from start values has twice the rank
    and alpha there that it has in a checkpoint.
    """
    where = run / "adapter" / component if several else run / "adapter"
    try:
        config = read_config(where)
    except LoraError as error:
        raise BadInput(
            f"{folder} holds adapter weights, but their config cannot be read from the run: {error}"
        ) from error
    init = _recipe(run).get("lora", {}).get("init_weights")
    if init not in BASE_SCHEMES or config.needs_base:
        return config
    factor = math.sqrt(2) if config.use_rslora else 2
    return replace(
        config,
        init=init,
        rank=config.rank // 2,
        alpha=config.alpha / factor,
        rank_pattern={key: rank // 2 for key, rank in config.rank_pattern.items()},
        alpha_pattern={key: alpha / factor for key, alpha in config.alpha_pattern.items()},
    )


def _recipe(run: Path) -> Mapping[str, Any]:
    file = run / "recipe.toml"
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read ({error}); give a complete run directory") from error
