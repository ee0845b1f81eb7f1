"""Deterministic training in this process: torch's switches, flash attention, and errors that name operators.

What is decided without torch is in ``drl.config.determinism``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from drl.config.determinism import FLASH_ENTRIES, deterministic_variables, flash_entry
from drl.errors import BadInput, DrlError

DISPATCH = "diffusers.models.attention_dispatch"
"""Module through whose names diffusers calls flash attention."""

_WITHOUT_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def determinism(recipe: Any) -> Iterator[Mapping[str, str]]:
    """Use deterministic kernels where ``train.deterministic`` asks for them; everything comes back after.

    Gives the environment variables that are still to be set, before CUDA starts. Raises BadInput, before
    anything has changed, for a flash attention that cannot be deterministic; DrlError, which names it, for
    an operator without a deterministic kernel.
    """
    if not recipe.train.deterministic:
        yield {}
        return
    with deterministic_kernels(recipe.train.attention_backend):
        try:
            yield deterministic_variables({**os.environ, **recipe.train.env})
        except Exception as error:
            told = explained(error)
            if told is error:
                raise
            raise told from error


def deterministic_kernels(attention_backend: str | None = None) -> ExitStack:
    """Set torch, its compiler and flash attention to deterministic kernels; closing restores what was there.

    Raises BadInput, and has changed nothing, for a flash attention that cannot be deterministic.
    """
    with ExitStack() as undo:
        cudnn = torch.backends.cudnn
        force_flash(undo, attention_backend)
        undo.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        undo.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        cudnn.deterministic, cudnn.benchmark = True, False
        # only a warning would leave attention its backward pass that adds up in any order
        torch.use_deterministic_algorithms(True, warn_only=False)
        undo.enter_context(deterministic_compilation())
        return undo.pop_all()


def make_deterministic(recipe: Any) -> None:
    """Use deterministic kernels for the rest of this process, a rank's own, where the recipe asks for them."""
    if recipe.train.deterministic:
        deterministic_kernels(recipe.train.attention_backend)


def deterministic_compilation() -> AbstractContextManager[object]:
    """Return a context in which torch.compile measures no kernels against each other, if torch is set so.

    Its settings belong to a thread: whoever compiles enters this. Without it the faster of two ways to
    multiply would win, and the next run may find the other one faster. A backward pass is compiled here too, not
    at its first call by a thread of autograd, which would not have them.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return nullcontext()
    import torch._functorch.config as graphs
    import torch._inductor.config as kernels

    undo = ExitStack()
    undo.enter_context(kernels.patch({"deterministic": True}))
    undo.enter_context(graphs.patch({"force_non_lazy_backward_lowering": True}))
    return undo


def force_flash(undo: ExitStack, backend: str | None) -> None:
    """Let diffusers call the flash attention of this name with ``deterministic=True``, until ``undo``.

    Nothing for torch's own kernels. Raises BadInput when the package is not there or lacks the argument.
    """
    name = flash_entry(backend)
    if name is None:
        return
    names = vars(importlib.import_module(DISPATCH))
    forced = deterministic_entry(names, name, str(backend))
    undo.callback(names.__setitem__, name, names[name])
    names[name] = forced


def deterministic_entry(names: Mapping[str, Any], name: str, backend: str) -> Callable[..., Any]:
    """Return the entry point of a module that is always asked to be deterministic; BadInput when it cannot."""
    entry = names.get(name)
    if entry is None:
        have = [known for known, other in FLASH_ENTRIES.items() if names.get(other)]
        raise BadInput(
            f"train.attention_backend = {backend!r}: {name} is not installed here, so train.deterministic "
            f"has nothing to make deterministic; installed: {', '.join(have) or 'no flash attention'}. "
            "Install its package, or leave train.attention_backend unset"
        )
    if "deterministic" not in (found := _arguments(entry)):
        raise BadInput(
            f"train.attention_backend = {backend!r}: {name} of {entry.__module__} takes "
            f"({', '.join(found) or 'unknown arguments'}) and no 'deterministic'; install a newer version, "
            "or leave train.attention_backend unset"
        )

    @wraps(entry)
    def always(*args: Any, **kwargs: Any) -> Any:
        return entry(*args, **{**kwargs, "deterministic": True})

    return always


def _arguments(entry: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(entry).parameters)
    except ValueError:  # compiled code may not tell
        return ()


def explained(error: BaseException) -> BaseException:
    """Return an error that names the operator without a deterministic kernel, where that is the reason."""
    found = next(filter(None, (_WITHOUT_KERNEL.search(str(one)) for one in chain(error))), None)
    if found is None:
        return error
    told = DrlError(
        f"train.deterministic: the operator {found[1]} has no deterministic kernel on this device; leave out "
        "the part of the model, the loss or the reward that uses it, run on another device, or set "
        "train.deterministic = false"
    )
    for note in vars(error).get("__notes__", ()):
        told.add_note(note)
    return told


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
