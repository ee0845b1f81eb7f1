"""What a file or folder is, from headers and JSON alone: no torch, whatever its size.

``describe`` returns plain values that JSON can hold; ``description.lines`` renders them for people.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from drl.errors import BadInput
from drl.formats.detect import CONFIG_FILE, Format, adapter_file, detect, peft_folders
from drl.formats.headers import Header, TensorFacts, read_header
from drl.formats.layout import (
    MODEL_INDEX,
    component_layout,
    components_of,
    read_object,
    weight_files,
)
from drl.formats.names import COMFY_DENOISER, COMPONENT, KOHYA_DENOISER, TEXT_ENCODERS

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
METADATA = "lora_adapter_metadata"
PEFT_PREFIX = "base_model.model."
EXPORT_FILE = "drl_export.json"
_TAIL = re.compile(
    r"(?P<path>.*?)(?P<processor>\.processor\.(to_[qkv]|to_out)_lora)?"
    r"\.(?:(?P<matrix>lora_A|lora_B|lora_down|lora_up)\.weight|(?:lora\.)?(?P<old>down|up)\.weight|"
    r"(?P<alpha>alpha))"
)
_FIRST = frozenset({"lora_A", "lora_down", "down"})
_VEOMNI = re.compile(r"\.experts\.(gate|up|down)_proj\.lora_")
_NEW_EXPERTS = (0, 19, 1)
"""From this version of peft on, the two pairs of an experts module have changed roles (lora.md 4.7)."""


def describe(path: Path) -> dict[str, Any]:
    """Return what a path is: format, components with ranks, alphas, scales and targets, dtype, bytes.

    Raises BadInput for what is damaged or no format that drl knows.
    """
    found = detect(path)
    facts: dict[str, Any] = {"path": str(path), "format": found.name.lower(), "title": str(found)}
    if found is Format.PEFT:
        facts |= _peft_facts({"": path})
    elif found is Format.PEFT_COMPONENTS:
        facts |= _peft_facts(peft_folders(path))
    elif found is Format.PIPELINE:
        facts |= _pipeline_facts(path)
    elif found in (Format.RUN, Format.CHECKPOINT):
        facts |= _folder_facts(path)
    elif found is Format.COMPONENT:
        facts |= _weights_facts([read_header(file) for file in weight_files(path)])
        facts["class"] = component_layout(path).class_name
    else:
        file = (adapter_file(path) or path) if path.is_dir() else path
        header = read_header(file)
        if found is Format.WEIGHTS:
            facts |= _weights_facts([header])
        else:
            facts |= _file_facts(header)
    return facts


def _peft_facts(folders: Mapping[str, Path]) -> dict[str, Any]:
    components: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    notes: list[str] = []
    size = 0
    for name, folder in folders.items():
        config = read_object(folder / CONFIG_FILE)
        header = _peft_header(folder)
        size += sum(one.bytes for one in header.tensors.values())
        tensors = {key.removeprefix(PEFT_PREFIX): one for key, one in header.tensors.items()}
        components[name or "adapter"] = _component_facts(tensors, config, _no_alphas)
        metadata |= {key: str(value) for key, value in config.items() if _is_told(value)}
        notes += notes_of_config(config, header)
    return {"components": components, "metadata": metadata, "notes": notes, "bytes": size}


def _peft_header(folder: Path) -> Header:
    if (folder / WEIGHTS_FILE).is_file():
        return read_header(folder / WEIGHTS_FILE)
    if not (folder / PICKLE_FILE).is_file():
        raise BadInput(f"{folder} has neither {WEIGHTS_FILE} nor {PICKLE_FILE}; copy it again")
    from drl.formats.pickled import (
        pickled_header,  # the only format that needs torch to be looked at
    )

    return pickled_header(folder / PICKLE_FILE)


def notes_of_config(config: Mapping[str, Any], header: Header) -> list[str]:
    """Return what is special about a PEFT directory: variants, and which era of expert files it is."""
    kind = config.get("peft_type")
    notes = [] if kind == "LORA" else [f"peft_type is {kind!r}, not LORA: drl does not read it"]
    notes += [
        f"{field}: the adapter uses {words}"
        for field, words in (
            ("use_dora", "DoRA, which drl does not read"),
            ("lora_bias", "biases inside its matrices, which drl does not read"),
            ("modules_to_save", "fully trained modules beside its matrices"),
            ("use_rslora", "the scale alpha / sqrt(rank)"),
        )
        if config.get(field)
    ]
    if config.get("bias", "none") != "none":
        notes.append(f"bias: it also trained biases ({config['bias']})")
    block = config.get("veomni_lora")
    if isinstance(block, dict) and block.get("moe_mode"):
        notes.append(f"expert adapters of VeOmni, mode {block['moe_mode']}")
    elif config.get("target_parameters"):
        notes.append(_experts_note(config.get("peft_version"), header))
    return notes


def _experts_note(version: object, header: Header) -> str:
    veomni = [one for key, one in header.tensors.items() if _VEOMNI.search(key)]
    if veomni:
        mode = "independent" if len(veomni[0].shape) == 3 else "shared"
        return f"expert adapters of VeOmni, mode {mode} (by their shapes)"
    if not isinstance(version, str):
        return (
            "expert adapters of peft, of an unknown era: peft_version is missing, and before 0.19.1 the two "
            "pairs had each other's role"
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    era = ">= 0.19.1" if numbers >= _NEW_EXPERTS else "< 0.19.1"
    return (
        f"expert adapters of peft {era} (written by {version}); a rank counts all experts together"
    )


def _file_facts(header: Header) -> dict[str, Any]:
    """Describe a diffusers, kohya or ComfyUI file."""
    groups: dict[str, dict[str, TensorFacts]] = defaultdict(dict)
    for key, one in header.tensors.items():
        prefix = prefix_of_key(key)
        groups[prefix][key.removeprefix(prefix)] = one
    config = _json_of(header.metadata.get(METADATA))
    alphas = _AlphaReader(header)
    components = {}
    for prefix, tensors in groups.items():
        described = {
            key.removeprefix(prefix): value
            for key, value in config.items()
            if key.startswith(prefix)
        }
        components[prefix.rstrip("._") or "model"] = _component_facts(
            tensors, described or None, alphas.within(prefix)
        )
    metadata = {key: value for key, value in header.metadata.items() if key != METADATA}
    size = sum(one.bytes for one in header.tensors.values())
    has_strength = bool(config) or any(key.endswith(".alpha") for key in header.tensors)
    notes = [] if has_strength else ["no alpha anywhere: it runs at scale 1.0"]
    return {"components": components, "metadata": metadata, "notes": notes, "bytes": size}


def prefix_of_key(key: str) -> str:
    """Return the part of a key that says its component, "" when it says none."""
    for prefix in (*TEXT_ENCODERS, PEFT_PREFIX):
        if key.startswith(prefix):
            return prefix
    match = KOHYA_DENOISER.match(key) or COMFY_DENOISER.match(key)
    if match:
        return match.group()
    first = key.partition(".")[0]
    return f"{first}." if COMPONENT.fullmatch(first) else ""


def _component_facts(
    tensors: Mapping[str, TensorFacts], config: Mapping[str, Any] | None, alphas: Any
) -> dict[str, Any]:
    """Summarise the adapted modules of one component."""
    ranks: dict[str, int] = {}
    dtypes: Counter[str] = Counter()
    others = []
    for key, one in tensors.items():
        match = _TAIL.fullmatch(key)
        if match is None:
            others.append(key)
            continue
        if match["alpha"]:
            continue
        dtypes[one.dtype] += 1
        if (match["matrix"] or match["old"]) in _FIRST:
            ranks[match["path"] + (match["processor"] or "")] = one.shape[-2] if one.shape else 0
    strengths = {path: _strength(path, rank, config, alphas) for path, rank in ranks.items()}
    return {
        "modules": len(ranks),
        "ranks": _counted(ranks.values()),
        "alphas": _counted(alpha for alpha, _ in strengths.values()),
        "scales": _counted(scale for _, scale in strengths.values()),
        "targets": dict(Counter(map(target_of, ranks)).most_common()),
        "dtypes": dict(dtypes),
        "other_tensors": len(others),
    }


def _strength(
    path: str, rank: int, config: Mapping[str, Any] | None, alphas: Any
) -> tuple[float, float]:
    """Return alpha and scale of one module, as a reader of the file would compute them."""
    if config is None:
        alpha = alphas(path)
        alpha = float(rank) if alpha is None else alpha
        return alpha, alpha / rank if rank else 0.0
    alpha = float(_by_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8)))
    declared = _by_pattern(config.get("rank_pattern"), path, config.get("r", 8))
    divisor = sqrt(declared) if config.get("use_rslora") else declared
    return alpha, alpha / divisor if divisor else 0.0


def _by_pattern(pattern: object, path: str, default: object) -> Any:
    """PEFT's rule: the first key that matches from a component boundary to the end (lora.md 1.4)."""
    if isinstance(pattern, dict):
        for key, value in pattern.items():
            try:
                if re.match(rf"(.*\.)?({key})$", path):
                    return value if isinstance(value, int | float) else 0
            except re.error:
                continue
    return default if isinstance(default, int | float) else 0


def _no_alphas(path: str) -> float | None:
    return None


class _AlphaReader:
    """Reads the scalars ``.alpha`` of a file; the only tensors that are ever read here."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.values: dict[str, float] = {}
        if any(key.endswith(".alpha") for key in header.tensors):
            self.values = dict(_scalars(header))

    def within(self, prefix: str) -> Any:
        """Return a function from module path to alpha, for one component."""

        def alpha(path: str) -> float | None:
            return self.values.get(f"{prefix}{path}.alpha")

        return alpha


def _scalars(header: Header) -> Iterator[tuple[str, float]]:
    """Yield the alphas; bfloat16, which numpy lacks, is widened by hand."""
    import struct

    with header.path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        offset = start
        for key, one in header.tensors.items():
            if key.endswith(".alpha") and one.bytes in (2, 4, 8):
                file.seek(offset)
                raw = file.read(one.bytes)
                codes = {"F16": "<e", "F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
                if one.dtype == "BF16":
                    yield key, float(struct.unpack("<f", b"\0\0" + raw)[0])
                elif one.dtype in codes:
                    yield key, float(struct.unpack(codes[one.dtype], raw)[0])
            offset += one.bytes


def target_of(path: str) -> str:
    """Return a module path with its block number left open, so that blocks group together."""
    return re.sub(r"(?<=[._])\d+(?=[._])", "*", path, count=1)


def _counted(values: Iterable[float]) -> dict[str, int]:
    return {f"{value:g}": count for value, count in Counter(values).most_common()}


def _is_told(value: object) -> bool:
    return value not in (None, False, "", "none") and value not in ([], {})


def _json_of(text: str | None) -> dict[str, Any]:
    import json

    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise BadInput(f"the header entry {METADATA} is no JSON ({error})") from error
    return fields if isinstance(fields, dict) else {}


def _weights_facts(headers: Iterable[Header]) -> dict[str, Any]:
    tensors = [one for header in headers for one in header.tensors.values()]
    return {
        "tensors": len(tensors),
        "dtypes": dict(Counter(one.dtype for one in tensors)),
        "bytes": sum(one.bytes for one in tensors),
    }


def _pipeline_facts(path: Path) -> dict[str, Any]:
    index = read_object(path / MODEL_INDEX)
    parts = [name for name in components_of(index) if weight_files(path / name)]
    held = {
        name: _weights_facts([read_header(file) for file in weight_files(path / name)])
        for name in parts
    }
    facts: dict[str, Any] = {
        "class": index.get("_class_name"),
        "parts": held,
        "bytes": sum(one["bytes"] for one in held.values()),
    }
    if (path / EXPORT_FILE).is_file():
        facts["title"] = "diffusers pipeline with merged weights"
        facts["merged"] = read_object(path / EXPORT_FILE)
    return facts


def _folder_facts(path: Path) -> dict[str, Any]:
    files = [file for file in path.rglob("*") if file.is_file()]
    facts: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in files)}
    adapter = path / "adapter"
    if adapter.is_dir() and peft_folders(adapter):
        facts["adapter"] = describe(adapter)
    return facts
