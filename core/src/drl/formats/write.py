"""Writing an ``Adapter`` in a format, and proving what was written by reading it again."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from drl.errors import BadInput, DrlError
from drl.formats.adapter import Adapter
from drl.formats.compare import compare
from drl.formats.diffusers_file import FILE, diffusers_tensors, refuse_others
from drl.formats.layout import Layout
from drl.formats.peft_folder import write_peft_folder
from drl.formats.read import read_adapter
from drl.formats.single_file import comfy_tensors, kohya_tensors
from drl.lora.tensor_file import save_tensors
from drl.observe.files import flush_directory

ADAPTER_FORMATS = ("peft", "diffusers", "kohya", "comfy")
SUFFIX = ".safetensors"
TOLERANCE = {"torch.float32": 1e-6, "torch.float64": 1e-6}
"""How far a layer may be off, relative to its norm, after a round trip; others get HALF."""
HALF = 1e-2


def write_adapter(adapter: Adapter, name: str, out: Path, layout: Layout | None) -> Path:
    """Write ``adapter`` as ``name`` (one of ADAPTER_FORMATS) to ``out``, which must not exist.

    kohya and comfy write a file ``*.safetensors`` and need the base's layout; peft writes a folder;
    diffusers a file when ``out`` ends in .safetensors, else a folder with the file that pipelines look
    for. What was written is read again and compared before ``out`` appears. Returns the path.
    """
    if name in ("kohya", "comfy"):
        if out.suffix != SUFFIX:
            raise BadInput(f"--out {out}: the format {name} is one file; end its name in {SUFFIX}")
        if layout is None:
            raise BadInput(
                f"--format {name} needs the base model's module names; give its pipeline with --base"
            )
        refuse_others(adapter, f"a {name} file")
    with fresh(out) as place:
        if name == "peft":
            write_peft_folder(adapter, place, layout)
        elif name == "diffusers":
            file = place if out.suffix == SUFFIX else place / FILE
            _write_file(file, *diffusers_tensors(adapter))
        else:
            assert layout is not None  # checked above
            build = kohya_tensors if name == "kohya" else comfy_tensors
            _write_file(place, *build(adapter, layout))
        check_same(adapter, place, layout)
    return out


def check_same(adapter: Adapter, path: Path, layout: Layout | None) -> None:
    """Read an adapter again and raise DrlError when it is not the one that was written."""
    again = read_adapter(path, layout=layout, component=adapter.single)
    for line in compare(adapter, again):
        dtype = str(adapter.components[line.component][line.path].A.dtype)
        if not line.relative <= TOLERANCE.get(dtype, HALF):
            raise DrlError(
                f"the export was thrown away: {line.component}.{line.path} came back different "
                f"(relative {line.relative:.2g}); this is a fault of drl, please report it"
            )


def _write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, tensors, metadata)


@contextmanager
def fresh(out: Path) -> Iterator[Path]:
    """Yield a path beside ``out`` that is renamed to it in the end; removed when anything fails.

    Raises BadInput when ``out`` exists already, is below a file, or cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise BadInput(f"--out {out} exists already; name a new path, nothing is overwritten")
    if any(parent.is_file() for parent in out.parents):
        raise BadInput(f"cannot write {out}: a part of its path is a file")
    beside = out.with_name(f".{out.stem}.new-{uuid.uuid4().hex[:12]}{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        flush(beside)
        beside.rename(out)
        flush_directory(out.parent)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"cannot write {out}: {error}; nothing is left of it") from error
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Bring a file, or a folder with everything in it, to disk."""
    for part in [*path.rglob("*"), path] if path.is_dir() else [path]:
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
