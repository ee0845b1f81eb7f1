"""``drl adapters check``: everything that can be wrong with an adapter, found without running a model."""

from __future__ import annotations

from pathlib import Path

from drl.formats.adapter import Adapter, embedding_layers, misfits
from drl.formats.detect import detect
from drl.formats.layout import Layout
from drl.formats.read import NEED_BASE, read_adapter
from drl.lora.errors import name_list
from drl.lora.matching import is_targeted


def problems_of(path: Path, layout: Layout | None, *, component: str | None = None) -> list[str]:
    """Return what is wrong with an adapter that can be read, one line each; reading raises BadInput.

    Without ``layout`` only what the adapter says of itself is checked.
    """
    # kohya and ComfyUI names are resolved beside the base, which is a check in itself
    needs = detect(path) in NEED_BASE
    adapter = read_adapter(path, layout=layout if needs else None, component=component)
    if layout is None:
        return _silent(adapter)
    return [*_silent(adapter), *misfits(adapter, layout), *unadapted(adapter, layout)]


def _silent(adapter: Adapter) -> list[str]:
    """Name a component that does nothing."""
    return [
        f"{component} has no effect: every B is zero or every scale is 0"
        for component, layers in adapter.components.items()
        if not any(layer.scale and bool(layer.B.any()) for layer in layers.values())
    ]


def unadapted(adapter: Adapter, layout: Layout) -> list[str]:
    """Name modules that the config selects but the file lacks: a loader would start them at random."""
    lines = []
    for component, config in adapter.configs.items():
        if component not in layout or config.target_modules == "all-linear":
            continue
        have = adapter.components[component]
        embeddings, _ = embedding_layers(adapter, component)
        lost = [
            path
            for path in layout[component].weights
            if path not in have and path not in embeddings and is_targeted(config, path)
        ]
        if lost:
            lines.append(
                f"{component}: target_modules also selects {name_list(lost)}, which the file has no "
                "tensors for; PEFT would add them untrained. Name the modules by longer paths"
            )
    return lines
