"""``read_adapter``: any format into an ``Adapter``."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drl.errors import BadInput
from drl.formats.adapter import Adapter, check_adapter, check_fits
from drl.formats.detect import Format, adapter_file, detect
from drl.formats.diffusers_file import read_diffusers
from drl.formats.headers import unreadable
from drl.formats.layout import Layout
from drl.formats.peft_folder import read_peft_folder
from drl.formats.single_file import read_single_file

ADAPTERS = frozenset(
    {
        Format.PEFT,
        Format.PEFT_COMPONENTS,
        Format.DIFFUSERS,
        Format.OLD_DIFFUSERS,
        Format.KOHYA,
        Format.COMFY,
    }
)
NEED_BASE = frozenset({Format.KOHYA, Format.COMFY})


def read_adapter(
    path: Path, *, layout: Layout | None = None, component: str | None = None
) -> Adapter:
    """Read an adapter of any format, and check it: complete, finite, shapes that fit each other.

    ``layout``: of the base model; kohya and ComfyUI files need it, as their names only make sense
    beside it, and every format is checked against it. ``component``: what a file that names no
    component belongs to. Raises BadInput before anything is returned.
    """
    found = detect(path)
    if found not in ADAPTERS:
        raise BadInput(f"{path} is no adapter: {found}")
    if found in NEED_BASE and layout is None:
        raise BadInput(
            f"{path} is a {found}; its module names can only be read beside the base model: give its "
            "pipeline with --base"
        )
    adapter = _read(path, found, layout, component)
    check_adapter(adapter, path)
    if layout is not None:
        check_fits(adapter, layout, path)
    return adapter


def _read(path: Path, found: Format, layout: Layout | None, component: str | None) -> Adapter:
    if found in (Format.PEFT, Format.PEFT_COMPONENTS):
        return read_peft_folder(path, component=component)
    file = adapter_file(path) if path.is_dir() else path
    assert file is not None  # detect has seen it
    tensors, metadata = read_tensors(file)
    try:
        if found in NEED_BASE:
            assert layout is not None  # checked by the caller
            return read_single_file(tensors, metadata, layout)
        return read_diffusers(tensors, metadata, component=component)
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors, on the CPU, and header metadata of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.offset_keys()}
            return tensors, opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise BadInput(unreadable(file, error)) from error
