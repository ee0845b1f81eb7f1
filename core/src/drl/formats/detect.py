"""What a path is: decided by its files and its keys alone, never by its name."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path

from drl.errors import BadInput
from drl.formats.headers import read_header
from drl.formats.layout import CONFIG, MODEL_INDEX, weight_files
from drl.formats.names import COMFY_DENOISER, KOHYA_DENOISER, TEXT_ENCODERS

CONFIG_FILE = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
RUN_MARKS = ("recipe.toml", "metrics.jsonl", "summary.json", "plugins.json", "lock")
MATRICES = (
    ".lora_A.",
    ".lora_B.",
    ".lora_down.",
    ".lora_up.",
    ".lora.down.",
    ".lora.up.",
    "_lora.down.",
    "_lora.up.",
)


class Format(enum.StrEnum):
    """Formats that drl tells apart; the value is how a person reads it."""

    RUN = "run directory of drl"
    CHECKPOINT = "checkpoint of drl"
    PEFT = "PEFT adapter"
    PEFT_COMPONENTS = "PEFT adapters, one per component"
    DIFFUSERS = "diffusers adapter file"
    OLD_DIFFUSERS = "old diffusers adapter file"
    KOHYA = "kohya adapter file"
    COMFY = "ComfyUI adapter file"
    PIPELINE = "diffusers pipeline"
    COMPONENT = "full weights of one component"
    WEIGHTS = "full weights"


def detect(path: Path) -> Format:
    """Return the format of a file or folder; BadInput says what is missing when it is none."""
    if not path.exists():
        raise BadInput(f"there is no file or folder {path}")
    return _of_folder(path) if path.is_dir() else _of_keys(read_header(path).tensors)


def _of_folder(path: Path) -> Format:
    if (path / CONFIG_FILE).is_file():
        return Format.PEFT
    if (path / MODEL_INDEX).is_file():
        return Format.PIPELINE
    if any((path / mark).is_file() for mark in RUN_MARKS):
        return Format.RUN
    if (path / "run.json").is_file() and (path / "manifest.json").is_file():
        return Format.CHECKPOINT
    if peft_folders(path):
        return Format.PEFT_COMPONENTS
    if (path / CONFIG).is_file() and weight_files(path):
        return Format.COMPONENT
    found = adapter_file(path)
    if found is not None:
        return _of_keys(read_header(found).tensors)
    raise BadInput(
        f"{path} is no adapter: it has neither {CONFIG_FILE} nor {DIFFUSERS_FILE}, and is no pipeline, run "
        "or checkpoint; give an adapter file or its folder"
    )


def adapter_file(folder: Path) -> Path | None:
    """Return the adapter file of a folder without a config: diffusers' name, else the only one."""
    if (folder / DIFFUSERS_FILE).is_file():
        return folder / DIFFUSERS_FILE
    files = sorted(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 else None


def peft_folders(folder: Path) -> dict[str, Path]:
    """Return the PEFT directories at a path by component; a single one at its root is ""."""
    if (folder / CONFIG_FILE).is_file():
        return {"": folder}
    return {part.name: part for part in sorted(folder.iterdir()) if (part / CONFIG_FILE).is_file()}


def _of_keys(keys: Iterable[str]) -> Format:
    names = list(keys)
    text = tuple(TEXT_ENCODERS)
    if any(KOHYA_DENOISER.match(key) or key.startswith(text) for key in names):
        return Format.KOHYA
    if any(COMFY_DENOISER.match(key) for key in names):
        return Format.COMFY
    adapted = [key for key in names if any(matrix in key for matrix in MATRICES)]
    if not adapted:
        return Format.WEIGHTS
    modern = any(".lora_A." in key or ".lora_B." in key for key in adapted)
    return Format.DIFFUSERS if modern else Format.OLD_DIFFUSERS
