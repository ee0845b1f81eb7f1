"""Module names in single files: prefixes, the flattening of kohya, names of the original repositories.

The flattening (dots become underscores) loses where components end, and names such as ``to_add_out``
have underscores of their own, so a flattened name is never taken apart: it is looked up among the
flattened names of the base model (lora.md 3.4).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drl.errors import BadInput
from drl.formats.layout import ComponentLayout, Layout

DENOISERS = ("transformer", "unet")
TEXT_ENCODERS = {
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
}
COMPONENT = re.compile(r"(transformer|unet|text_encoder|prior|image_encoder|connectors)(_\d+)?")
"""Component names that a diffusers file may prefix its keys with."""
KOHYA_DENOISER = re.compile(r"lora_unet(\d*)_")
COMFY_DENOISER = re.compile(r"diffusion_model(?:_(\d+))?\.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module is in the original repository: part ``part`` of ``parts`` along the output rows."""

    name: str
    part: int = 0
    parts: int = 1


Rules = Sequence[tuple[str, str]]
_BLOCK = r"transformer_blocks\.(\d+)\."
_SD3: Rules = (
    (_BLOCK + r"attn\.to_([qkv])", r"joint_blocks.\1.x_block.attn.qkv"),
    (_BLOCK + r"attn\.add_([qkv])_proj", r"joint_blocks.\1.context_block.attn.qkv"),
    (_BLOCK + r"attn2\.to_([qkv])", r"joint_blocks.\1.x_block.attn2.qkv"),
    (_BLOCK + r"attn\.to_out\.0", r"joint_blocks.\1.x_block.attn.proj"),
    (_BLOCK + r"attn\.to_add_out", r"joint_blocks.\1.context_block.attn.proj"),
    (_BLOCK + r"attn2\.to_out\.0", r"joint_blocks.\1.x_block.attn2.proj"),
    (_BLOCK + r"ff\.net\.0\.proj", r"joint_blocks.\1.x_block.mlp.fc1"),
    (_BLOCK + r"ff\.net\.2", r"joint_blocks.\1.x_block.mlp.fc2"),
    (_BLOCK + r"ff_context\.net\.0\.proj", r"joint_blocks.\1.context_block.mlp.fc1"),
    (_BLOCK + r"ff_context\.net\.2", r"joint_blocks.\1.context_block.mlp.fc2"),
    (_BLOCK + r"norm1\.linear", r"joint_blocks.\1.x_block.adaLN_modulation.1"),
    (r"context_embedder", "context_embedder"),
    (r"pos_embed\.proj", "x_embedder.proj"),
    (r"proj_out", "final_layer.linear"),
    (r"time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
    (r"time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
)
_WAN: Rules = (
    (r"blocks\.(\d+)\.attn1\.to_(?:([qkv])|out\.0)", r"blocks.\1.self_attn.*"),
    (r"blocks\.(\d+)\.attn2\.to_(?:([qkv])|out\.0)", r"blocks.\1.cross_attn.*"),
    (r"blocks\.(\d+)\.attn2\.add_([kv])_proj", r"blocks.\1.cross_attn.\2_img"),
    (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
    (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"patch_embedding", "patch_embedding"),
    (r"proj_out", "head.head"),
)
ORIGINAL_NAMES: Mapping[str, Rules] = {
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
}
"""By model class: the whole module path in diffusers, the path in the original repository.

Modulation layers whose two halves changed places (``norm_out``, the last ``norm1_context``) have no rule.
"""


def original_place(class_name: str, path: str) -> Place | None:
    """Return where a module is in the original repository; None when no rule covers it."""
    for pattern, name in ORIGINAL_NAMES.get(class_name, ()):
        match = re.fullmatch(pattern, path)
        if match is None:
            continue
        expanded = match.expand(name)
        if name.endswith(".*"):
            return Place(expanded[:-1] + (match.group(2) or "o"))
        if name.endswith(".qkv"):
            return Place(expanded, part="qkv".index(match.group(2)), parts=3)
        return Place(expanded)
    return None


def flat(path: str) -> str:
    """Return a module path as kohya spells it."""
    return path.replace(".", "_")


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Every name under which a file may mean modules of one component.

    ``find`` takes a name with dots, or a flattened one, of diffusers or of the original repository.
    """

    component: str
    layout: ComponentLayout
    known: Mapping[str, list[tuple[str, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        whole: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        for path in self.layout.weights:
            found[path].add((path,))
            found[flat(path)].add((path,))
            place = original_place(self.layout.class_name, path)
            if place is not None:
                whole[place.name, place.parts][place.part] = path
        for (name, count), parts in whole.items():
            if len(parts) == count:
                paths = tuple(parts[part] for part in range(count))
                found[name].add(paths)
                found[flat(name)].add(paths)
        object.__setattr__(self, "known", {name: sorted(all_) for name, all_ in found.items()})

    def find(self, name: str) -> tuple[str, ...] | None:
        """Return the modules behind a name: one, or the parts of a fused layer in row order.

        None when the model has no such module. Raises BadInput when the name could mean two.
        """
        meant = self.known.get(name, [])
        if len(meant) > 1:
            choices = " or ".join(" + ".join(paths) for paths in meant)
            raise BadInput(
                f'"{name}" is ambiguous in {self.component}: it could mean {choices}; use a file whose '
                "names keep their dots (PEFT or diffusers)"
            )
        return meant[0] if meant else None


def denoiser(components: Iterable[str]) -> str:
    """Return the name of the denoising model among components; "transformer" when there is none."""
    return next((name for name in DENOISERS if name in components), DENOISERS[0])


def component_of_kohya(prefix: str, layout: Layout) -> str:
    """Return the component that ``lora_unet_``, ``lora_unet2_`` or ``lora_te1_`` stands for."""
    if prefix in TEXT_ENCODERS:
        return TEXT_ENCODERS[prefix]
    match = KOHYA_DENOISER.fullmatch(prefix)
    return numbered(denoiser(layout), match.group(1) if match else "")


def numbered(name: str, number: str | None) -> str:
    """Return ``name`` for the first expert, ``name_2`` for the second."""
    return f"{name}_{number}" if number else name


def kohya_prefix(component: str) -> str:
    """Return the prefix of a component's keys: ``lora_unet_``, ``lora_unet2_``, ``lora_te1_``."""
    kind, number = split_number(component)
    if kind in DENOISERS:
        return f"lora_unet{number}_"
    if kind == "text_encoder":
        return f"lora_te{number or 1}_"
    raise BadInput(f"kohya files have no place for component '{component}'; use --format peft")


def comfy_prefix(component: str) -> str:
    """Return the prefix of a component's keys: ``diffusion_model.``, ``diffusion_model_2.``."""
    kind, number = split_number(component)
    if kind not in DENOISERS:
        raise BadInput(
            f"drl writes no ComfyUI keys for component '{component}'; use --format kohya or peft"
        )
    return f"{numbered('diffusion_model', number)}."


def split_number(component: str) -> tuple[str, str]:
    """Split ``transformer_2`` into its name and number; the number of the first is empty."""
    match = re.fullmatch(r"(.*?)(?:_(\d+))?", component)
    assert match is not None  # matches everything
    return match.group(1), match.group(2) or ""
