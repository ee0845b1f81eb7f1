"""Which dtype each parameter is kept and computed in: frozen weights, and modules with one of their own.

Under adapters the base is never stepped, so nothing needs its masters: it is kept in the forward dtype,
in which every forward would round it anyway. Single modules may have another dtype
(``train.parameter_dtypes`` and the family's ``TrainPipelineConfig.parameter_dtypes``): they compute in it,
with autocast off, between inputs that are cast to it and an output that is cast back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from drl.components import EMPTY
from drl.config.messages import did_you_mean
from drl.errors import BadInput
from drl.lora import base_names, to_plain_name
from drl.lora.switches import SavedModule
from drl.mathematics.feeding import DTYPES


@dataclass(frozen=True, slots=True)
class Overrides:
    """Parameters whose dtype is not the forward's, by their names in the module, and globs without effect.

    ``dtypes`` leaves out what equals the forward dtype. ``unmatched``: globs that no parameter fits.
    """

    dtypes: Mapping[str, torch.dtype] = EMPTY
    unmatched: tuple[str, ...] = ()


NONE = Overrides()
"""Every parameter in the forward dtype."""


def joined_globs(*sources: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Join pairs of glob and dtype so that a later one comes after, and so wins over, an earlier one."""
    joined: dict[str, str] = {}
    for glob, dtype in chain(*sources):
        joined.pop(glob, None)  # given again, it counts where it was given last
        joined[glob] = dtype
    return joined


def find_overrides(
    name: str, module: nn.Module, globs: Mapping[str, str], forward_dtype: str
) -> Overrides:
    """Return which parameters of a component get a dtype of their own; the last glob that fits wins.

    Globs are matched, with case, against plain names: those of the model without adapters. Adapters
    themselves are not matched; a copy of ``modules_to_save`` follows its original. Raises BadInput when
    a module would have direct parameters of two dtypes, which no forward of it could respect.
    """
    if not globs:
        return NONE
    wishes: dict[str, str | None] = {}
    matched: set[str] = set()
    for key, plain in plain_names(module).items():
        fitting = [glob for glob in globs if fnmatchcase(plain, glob)]
        matched.update(fitting)
        wishes[key] = globs[fitting[-1]] if fitting else None
    default = DTYPES[forward_dtype]
    dtypes = {key: DTYPES[wish] for key, wish in wishes.items() if wish is not None}
    dtypes = {key: dtype for key, dtype in dtypes.items() if dtype != default}
    check_whole_modules(name, module, dtypes)
    return Overrides(dtypes, tuple(glob for glob in globs if glob not in matched))


def plain_names(module: nn.Module) -> dict[str, str]:
    """Return the plain name of every parameter of the base, and of trained copies of its modules, by name."""
    base = base_names(module)
    names = {key: base[key] for key, _ in module.named_parameters() if key in base}
    for path, child in module.named_modules():
        if isinstance(child, SavedModule):
            for adapter, copy in child.modules_to_save.items():
                names |= {
                    f"{path}.modules_to_save.{adapter}.{key}": f"{to_plain_name(path)}.{key}"
                    for key, _ in copy.named_parameters()
                }
    return names


def check_whole_modules(name: str, module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise BadInput for a module of which only some direct parameters have this dtype."""
    for path, child in module.named_modules():
        keys = [
            f"{path}.{own}" if path else own for own, _ in child.named_parameters(recurse=False)
        ]
        found = {dtypes.get(key) for key in keys}
        if len(found) > 1:
            told = ", ".join(f"{to_plain_name(key)}: {told_dtype(dtypes.get(key))}" for key in keys)
            raise BadInput(
                f"train.parameter_dtypes: {name}.{to_plain_name(path)} would have parameters of different "
                f"dtypes ({told}), but a module computes in one; use a glob over all of it: "
                f"'{to_plain_name(path)}.*'"
            )


def check_matched(modules: Mapping[str, nn.Module], unmatched: Sequence[str]) -> None:
    """Raise BadInput for a glob that fits no parameter of any component, with near names."""
    if not unmatched:
        return
    names = [plain for module in modules.values() for plain in plain_names(module).values()]
    raise BadInput(
        f"train.parameter_dtypes: '{unmatched[0]}' matches no parameter of {', '.join(modules)}"
        f"{did_you_mean(unmatched[0], names)}; names are like {', '.join(names[:3])}"
    )


def told_dtype(dtype: torch.dtype | None) -> str:
    """Return a dtype for a message."""
    return "the forward's" if dtype is None else str(dtype).removeprefix("torch.")


@torch.no_grad()
def store_frozen(module: nn.Module, forward_dtype: str, overrides: Overrides = NONE) -> None:
    """Keep the frozen base in the forward dtype, or in its own, from now on.

    Adapters, trained copies and buffers stay as they are: position tables are exact, adapters are
    masters. Values that start values of adapters come from must have been read already.
    """
    base = base_names(module)
    for key, parameter in module.named_parameters():
        if key in base and not parameter.requires_grad and parameter.is_floating_point():
            # a parameter keeps its identity: others hold it by then
            parameter.data = parameter.data.to(overrides.dtypes.get(key, DTYPES[forward_dtype]))


class OwnDtype(nn.Module):
    """The forward of a module that computes in its own dtype, whatever surrounds it; comes before its class.

    Floating inputs are cast to ``own_dtype`` and floating outputs to ``result_dtype``. Parameters in that
    dtype are used as they are, with autocast off; masters of another dtype are cast to it by autocast.
    ``plain`` is the class before.
    """

    plain: ClassVar[type]
    own_dtype: ClassVar[torch.dtype]
    result_dtype: ClassVar[torch.dtype]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; its signature is the caller's affair."""
        parameter = next(self.parameters(recurse=False))
        given = [cast(value, self.own_dtype) for value in args]
        named = {key: cast(value, self.own_dtype) for key, value in kwargs.items()}
        masters = parameter.dtype != self.own_dtype
        with torch.autocast(
            parameter.device.type, dtype=self.own_dtype if masters else None, enabled=masters
        ):
            output = super().forward(*given, **named)
        if isinstance(output, tuple):
            return tuple(cast(value, self.result_dtype) for value in output)
        return cast(output, self.result_dtype)


CLASSES: dict[tuple[type, torch.dtype, torch.dtype], type] = {}
"""Classes of modules with a dtype of their own: one for all alike, so that alike blocks share a graph."""


def own_dtype_class(kind: type, dtype: torch.dtype, result: torch.dtype) -> type:
    """Return the class of a module of this class that computes in ``dtype`` and gives ``result``."""
    key = kind, dtype, result
    if key not in CLASSES:
        own = {"plain": kind, "own_dtype": dtype, "result_dtype": result}
        CLASSES[key] = type(kind.__name__, (OwnDtype, kind), own)
    return CLASSES[key]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a floating tensor in this dtype; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def compute_in(name: str, module: nn.Module, overrides: Overrides, forward_dtype: str) -> None:
    """Let modules with a dtype of their own compute in it, in place; before sharding and compilation.

    A module that holds parametrised modules besides its own parameters keeps these parameters in their
    dtype, and its arithmetic promotes. Raises BadInput where masters cannot be had in that dtype.
    """
    parameters = dict(module.named_parameters())
    for key, dtype in overrides.dtypes.items():
        parameter = parameters[key]
        if parameter.requires_grad and parameter.dtype.itemsize < dtype.itemsize:
            raise BadInput(
                f"train.parameter_dtypes: {name}.{to_plain_name(key)} is trained and stored in "
                f"{told_dtype(parameter.dtype)} (train.master_dtype), which cannot compute in "
                f"{told_dtype(dtype)}; use a wider train.master_dtype"
            )
    for child, dtype in overridden_leaves(module, overrides):
        child.__class__ = own_dtype_class(type(child), dtype, DTYPES[forward_dtype])


def overridden_leaves(
    module: nn.Module, overrides: Overrides
) -> list[tuple[nn.Module, torch.dtype]]:
    """Return the modules that compute in a dtype of their own, and it; those without parametrised children."""
    leaves = []
    for path, child in module.named_modules():
        own = [f"{path}.{key}" if path else key for key, _ in child.named_parameters(recurse=False)]
        if own and own[0] in overrides.dtypes and is_leaf(child):
            leaves.append((child, overrides.dtypes[own[0]]))
    return leaves


def overridden_tables(module: nn.Module, overrides: Overrides) -> list[str]:
    """Return parameters with a dtype of their own that lie beside parametrised modules, by name."""
    return [
        key for key in overrides.dtypes if not is_leaf(module.get_submodule(key.rpartition(".")[0]))
    ]


def is_leaf(module: nn.Module) -> bool:
    """True when no child of a module has parameters."""
    return not any(True for child in module.children() for _ in child.parameters())
