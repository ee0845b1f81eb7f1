"""The data sources that ship with core: ``jsonl``, ``image_folder`` and ``blank``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_data_sources() -> Sequence[Component]:
    """Offer them."""
    return [
        Component(
            "jsonl",
            "drl.builtin.data_jsonl:JsonlSource",
            summary="Prompts from a JSON-lines file, one row per prompt.",
            config="drl.builtin.config_data:JsonlOptions",
        ),
        Component(
            "image_folder",
            "drl.builtin.data_image_folder:ImageFolderSource",
            summary="Pictures of a folder with their captions, for supervised training.",
            config="drl.builtin.config_data:ImageFolderOptions",
        ),
        Component(
            "blank",
            "drl.builtin.data_blank:BlankSource",
            summary="Prompts without text, for a rollout.function that finds its own data.",
        ),
    ]
