"""How a component computes, the same for trainer and engine: attention kernel, dtypes, recomputed blocks.

The trainer's order is: build, ``prepare_built``, inject adapters, ``prepare_dtypes``, shard, compile. An
engine whose module is complete calls ``prepare_for_engine`` and, where it compiles, ``compile_blocks``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from drl.interfaces.engine import Launch
from drl.interfaces.family import TrainPipelineConfig
from drl.mathematics.feeding import DTYPES
from drl.model.attention import choose_attention
from drl.model.checkpointing import checkpoint_blocks
from drl.model.materialize import check_filled
from drl.model.precision import Overrides, compute_in, find_overrides, joined_globs, store_frozen


def prepare_built(
    recipe: Any, name: str, module: nn.Module, config: TrainPipelineConfig, device: str
) -> None:
    """Set attention kernel and recomputed blocks of a component as it was built, in place.

    Raises BadInput where the component or the device cannot do what the recipe asks for.
    """
    train = recipe.train
    choose_attention(
        name, module, train.attention_backend, device=device, dtype=DTYPES[train.forward_dtype]
    )
    share, recomputes = recipe.model.checkpointed_share, recipe.model.gradient_checkpointing
    if recomputes:
        checkpoint_blocks(name, module, config.wrap, share, compiled=train.compile)


def parameter_dtypes(recipe: Any, config: TrainPipelineConfig) -> dict[str, str]:
    """Return the globs of a component to dtypes, the recipe's after the family's: the last one wins."""
    return joined_globs(config.parameter_dtypes.items(), recipe.train.parameter_dtypes)


def prepare_dtypes(
    recipe: Any, name: str, module: nn.Module, config: TrainPipelineConfig, *, adapters: bool
) -> Overrides:
    """Store the base under ``adapters`` in its dtype; let modules with a dtype of their own compute in it.

    Returns these dtypes. Adapters are in the module already. Raises BadInput for what cannot be respected.
    """
    forward = recipe.train.forward_dtype
    overrides = find_overrides(name, module, parameter_dtypes(recipe, config), forward)
    if adapters:
        store_frozen(module, forward, overrides)
    compute_in(name, module, overrides, forward)
    return overrides


def prepare_for_engine(
    name: str, module: nn.Module, launch: Launch, *, store: bool = False
) -> Overrides:
    """Let an engine's frozen module compute as the trainer's does, in place; return its dtypes.

    ``store``: keep the weights in the forward dtype too, except for those with a dtype of their own; they
    must come in fp32 for that. Otherwise weights stay as they are, but for these, which are stored in
    their dtype. Call it once the module has its weights, the trainer's own where they are shared. Then the
    family finishes the module, as it does the trainer's; ContractError for what has no values after that.
    """
    choose_attention(
        name, module, launch.attention_backend, device=launch.device, dtype=DTYPES[launch.dtype]
    )
    globs = launch.parameter_dtypes.get(name, {})
    overrides = find_overrides(name, module, globs, launch.dtype)
    if store:
        store_frozen(module, launch.dtype, overrides)
    for key, dtype in overrides.dtypes.items():
        parameter = module.get_parameter(key)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    compute_in(name, module, overrides, launch.dtype)
    launch.family.finish(name, module)
    check_filled(name, module)
    return overrides
