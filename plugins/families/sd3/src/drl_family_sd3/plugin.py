"""Registers the family ``sd3`` and its data source ``glyphs``, and claims checkpoints."""

from __future__ import annotations

from drl.api import CheckpointFacts, Claim, Component, hookimpl

DRL_API = (1, 0)
PIPELINE_CLASS = "StableDiffusion3Pipeline"
NAME_PATTERNS = ("stable-diffusion-3", "sd3")


@hookimpl
def drl_register_families() -> list[Component]:
    """Offer the family."""
    return [
        Component(
            "sd3",
            "drl_family_sd3.family:Sd3Family",
            summary="Stable Diffusion 3 and 3.5, from a diffusers folder or hub id.",
            config="drl_family_sd3.config:Sd3Options",
            facts={"model_kind": "diffusion", "media": ("image",)},
        )
    ]


@hookimpl
def drl_register_data_sources() -> list[Component]:
    """Offer pictures of words for supervised training."""
    return [
        Component(
            "glyphs",
            "drl_family_sd3.glyph_source:GlyphSource",
            summary="Rendered words of random letters, each with the prompt that asks for it.",
            config="drl_family_sd3.config:GlyphOptions",
        )
    ]


@hookimpl
def drl_claim_checkpoint(checkpoint: CheckpointFacts) -> Claim | None:
    """Claim by the class in model_index.json, else by the longest pattern in the reference."""
    index = checkpoint.model_index or {}
    if index.get("_class_name") == PIPELINE_CLASS:
        return Claim(family="sd3", by="class", pattern=PIPELINE_CLASS)
    reference = checkpoint.reference.lower()
    found = [pattern for pattern in NAME_PATTERNS if pattern in reference]
    if not found:
        return None
    return Claim(family="sd3", by="name", pattern=max(found, key=len))
