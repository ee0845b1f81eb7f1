"""The attention kernel of a model, chosen by its name in diffusers, without a trace in the process.

diffusers keeps a kernel per attention processor and, besides, one for the whole process, which its own
setter changes too; that one is put back. Processors that call torch's attention by themselves cannot be
given another package's kernel, but torch's own kernels, by torch's own switch around each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from drl.config.messages import did_you_mean
from drl.errors import BadInput

OPTION = "train.attention_backend"
HEADS = 64
"""Head size of the trial; every kernel has it."""

NATIVE = {
    "native": None,
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_math": SDPBackend.MATH,
}
"""What diffusers calls torch's kernels; "native" is torch's own choice among them."""

FIELD = "_attention_backend"
"""Where a processor that can be given a kernel keeps it."""


def check_attention_name(backend: str | None) -> str | None:
    """Return the name as diffusers spells it, in lower case; BadInput for one that it does not know."""
    if backend is None:
        return None
    known = known_backends()
    if backend.lower() not in known:
        raise BadInput(
            f"{OPTION}: diffusers has no attention backend '{backend}'"
            f"{did_you_mean(backend.lower(), known)}; it has torch's own {', '.join(NATIVE)}, "
            f"and, for models that can be given another package's kernel, "
            f"{', '.join(name for name in known if name not in NATIVE)}"
        )
    return backend.lower()


def known_backends() -> list[str]:
    """Return the names that this version of diffusers knows, sorted."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return sorted(name.value for name in AttentionBackendName)


def choose_attention(
    name: str, module: nn.Module, backend: str | None, *, device: str, dtype: torch.dtype
) -> None:
    """Give a component this attention kernel, in place; None leaves it as its model made it.

    ``device``, ``dtype``: where and in what it will compute; a short trial shows that the kernel runs there,
    forward and backward. Raises BadInput for a kernel that cannot run here or that this model cannot use.
    """
    backend = check_attention(name, module, backend)
    if backend is None:
        return
    found = processors_of(module)
    direct = direct_ones(found)
    try_attention(backend, device, dtype)
    if len(direct) < len(found):
        set_dispatched(module, backend)
    kernel = NATIVE.get(backend)
    if kernel is not None:
        for key in direct:
            fix_kernel(found[key], kernel)


def check_attention(name: str, module: nn.Module, backend: str | None) -> str | None:
    """Return the name of a kernel that this model can use, on a device that has it, as diffusers spells it.

    Raises BadInput for one that diffusers does not know or that this model cannot use.
    """
    backend = check_attention_name(backend)
    if backend is None:
        return None
    found = processors_of(module)
    if not found:
        raise BadInput(
            f"{OPTION}: {name} ({type(module).__name__}) has no attention that diffusers could give a "
            "kernel to; leave the option unset"
        )
    direct = direct_ones(found)
    if direct and backend not in NATIVE:
        kind = type(found[direct[0]]).__name__
        raise BadInput(
            f"{OPTION} = '{backend}': {name} computes attention in {kind}, which calls torch's own "
            f"kernels; use {', '.join(NATIVE)}, or leave the option unset"
        )
    return backend


def direct_ones(processors: Mapping[str, Any]) -> list[str]:
    """Return the names of those that call torch's kernels themselves and cannot be given another."""
    return [key for key, processor in processors.items() if FIELD not in dir(processor)]


def processors_of(module: nn.Module) -> dict[str, Any]:
    """Return the attention processors of a diffusers model by name; none for another module."""
    from diffusers.models.attention import AttentionMixin, AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    if not isinstance(module, AttentionMixin):
        return {}
    classes = Attention, AttentionModuleMixin
    attentions = ((key, child) for key, child in module.named_modules())
    found = {key: child.processor for key, child in attentions if isinstance(child, classes)}
    return {key: processor for key, processor in found.items() if processor is not None}


def set_dispatched(module: Any, backend: str) -> None:
    """Let diffusers set the kernel of this model's processors, and of nothing else in the process."""
    from diffusers.models.attention_dispatch import attention_backend

    with refusals(backend), attention_backend("native"):  # its end puts the process's choice back
        module.set_attention_backend(backend)


CLASSES: dict[tuple[type, SDPBackend], type] = {}
"""Classes of processors that use one kernel: one for all alike, so that alike blocks share a graph."""


def fix_kernel(processor: object, kernel: SDPBackend) -> None:
    """Let a processor that calls torch's attention use one kernel."""
    key = type(processor), kernel
    if key not in CLASSES:
        CLASSES[key] = with_kernel(*key)
    processor.__class__ = CLASSES[key]


def with_kernel(kind: type, kernel: SDPBackend) -> type:
    """Return a class of processors that use one kernel."""
    inner: Callable[..., Any] = kind.__call__

    # a model asks for the processor's signature to see what it may pass
    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(kernel):
            return inner(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def try_attention(backend: str, device: str, dtype: torch.dtype) -> None:
    """Compute a small attention and its gradients; BadInput when the kernel cannot."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    query, key, value = (
        torch.zeros(1, 16, 2, HEADS, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    with torch.enable_grad(), refusals(backend), attention_backend(backend):
        dispatch_attention_fn(query, key, value).sum().backward()


@contextmanager
def refusals(backend: str) -> Iterator[None]:
    """Turn what diffusers, torch or a package says about a kernel that cannot run into BadInput."""
    try:
        yield
    except (RuntimeError, ValueError, ImportError, OSError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"{OPTION} = '{backend}' cannot be used here: {reason}; leave the option unset, or use 'native'"
        ) from error
