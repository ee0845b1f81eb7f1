"""A third-party family of video models: Wan 2.1 as diffusers has it, as far as supervised training needs."""

from __future__ import annotations

from drl.api import CheckpointFacts, Claim, Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_families():
    return [
        Component(
            "acme_wan",
            "acme_wan_family:WanFamily",
            summary="Text to video by Wan.",
            facts={"model_kind": "diffusion", "media": ("video",)},
        )
    ]


@hookimpl
def drl_claim_checkpoint(checkpoint: CheckpointFacts):
    index = checkpoint.model_index or {}
    name = index.get("_class_name")
    return Claim(family="acme_wan", by="class", pattern=name) if name == "WanPipeline" else None
