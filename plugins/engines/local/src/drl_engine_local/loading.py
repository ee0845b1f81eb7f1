"""The engine's models at start: of the trainer's own frozen weights, or of a copy read from the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drl.api import BadInput, Launch, WeightSource
from drl.mathematics.feeding import DTYPES
from drl.model.prepare import prepare_for_engine
from drl_engine_local.component import Component, with_shared

SHARED, AUTO = "shared", "auto"


def load_components(launch: Launch, options: Any) -> dict[str, Component]:
    """Return every component of a launch, ready to sample, once ``check_options`` has let it through."""
    return {name: load_component(launch, name, options) for name in launch.components}


def load_component(launch: Launch, name: str, options: Any) -> Component:
    """Return one component; ``auto`` shares what it can and holds the rest in fp32."""
    applied = options.adapters == "applied"
    shared = launch.shared.get(name) if may_share(options) else None
    source = WeightSource(checkpoint=launch.checkpoint, dtype="fp32", device=launch.device)
    rounded = options.weights == "forward"
    if shared is not None:
        meta = replace(source, dtype=launch.dtype, meta=True)
        model = with_shared(launch.family, name, meta, shared)
    else:
        if rounded and not launch.parameter_dtypes.get(name):
            source = replace(source, dtype=launch.dtype)  # never the whole in fp32
        model = launch.family.build(name, source).eval().requires_grad_(False)
    prepare_for_engine(name, model, launch, store=rounded and shared is None)
    autocast = None if launch.dtype == "fp32" else DTYPES[launch.dtype]
    return Component.of(model, shared=shared is not None, applied=applied, autocast=autocast)


def may_share(options: Any) -> bool:
    """Say whether the options allow to compute with the trainer's weights."""
    return options.weights in (SHARED, AUTO)


def check_options(launch: Launch, options: Any) -> None:
    """Raise BadInput for weights that nobody shares, and for adapters to apply that nobody will push.

    A run that pushes nothing has neither, and both would change nothing.
    """
    if not launch.pushes:
        return
    alone = [name for name in launch.components if name not in launch.shared]
    if options.weights == SHARED and alone:
        raise BadInput(
            f"rollout.local.weights = 'shared', but the trainer has no weights to share for "
            f"{', '.join(alone)}: only frozen weights are shared, beside adapters that are pushed as they "
            "are, whole, and on the engine's device; use 'auto', which shares where it can"
        )
    targets = [name for name in launch.components if launch.lora_targets.get(name)]
    if options.adapters == "applied" and not targets:
        raise BadInput(
            "rollout.local.adapters = 'applied', but no adapters are pushed to the engine: weights are "
            "trained in full, or adapters have parts that only the trainer can merge (sync.updater); use "
            "'merged'"
        )
