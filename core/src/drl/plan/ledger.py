"""Memory and work of a computation that never happens: it runs on the meta device under a ledger.

A tensor on the meta device has a shape and no values, so a model of any size runs in a second and in no
memory. ``Ledger`` sees every operator below autograd: it adds up its matrix products (2 operations per
multiply-add, as torch's own ``FlopCounterMode`` does) and follows each storage from the operator that made it
to its end. ``Precision`` does to the operators of PyTorch what autocast does on a GPU, which the meta device
has not: matrix products in the low precision, norms in float32, attention by a kernel that keeps its
inputs, its output and one float32 number per query.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from drl.plan.allocator import Segments

ALLOCATION = 512
"""A GPU's allocator hands out multiples of this many bytes."""


class Ledger(TorchDispatchMode):
    """Counts live bytes, their peak, and floating-point operations. What existed before counts nothing.

    ``reordered``: convolutions of tensors with the channels first hold copies of input and output with the channels
    last while they run, as cuDNN's kernels for tensor cores do; compiled code has the channels last throughout.
    ``segments``: what memory is handed out of, where that is to be known.
    """

    def __init__(self, *, reordered: bool = False, segments: Segments | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reordered = reordered
        self.segments = segments
        self.live = 0
        self.peak = 0
        self.flops = 0.0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._see(given, counted=False)
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        convolution = packet is torch.ops.aten.convolution
        if convolution and _channels_last(args[0]):
            # a GPU keeps the order, the meta device forgets it
            out = torch.empty_like(out, memory_format=torch.channels_last)
        if packet in flop_registry:
            self.flops += float(flop_registry[packet](*args, **kwargs, out_val=out))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._see(made, counted=True)
        if self.reordered and convolution and not _channels_last(args[0]):
            self.peak = max(self.peak, self.live + args[0].nbytes + out.nbytes)
        return out

    def _see(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._known:
            return
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION if counted else 0
        segments = self.segments if size else None
        block = None if segments is None else segments.take(size)

        def ended(_: object) -> None:
            del self._known[identity]
            self.live -= size
            if segments is not None and block is not None:
                segments.give_back(block)

        self._known[identity] = weakref.ref(storage, ended)
        self.live += size
        self.peak = max(self.peak, self.live)


def _channels_last(images: Tensor) -> bool:
    return images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)


class Attention(torch.autograd.Function):
    """The shapes of a fused attention kernel: queries ``(..., S, D)``, keys and values ``(..., T, D)``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output's shape; keeps what a fused kernel keeps."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of the shapes of the inputs."""
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


LOW = frozenset(
    {
        functional.linear,
        functional.bilinear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.bmm,
        Tensor.mm,
    }
)
"""Operators that autocast runs in the low precision."""

FULL = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.softmax,
        functional.mse_loss,
        torch.softmax,
        torch.pow,
        torch.exp,
        torch.rsqrt,
        Tensor.softmax,
        Tensor.pow,
        Tensor.exp,
        Tensor.rsqrt,
        Tensor.sum,
        torch.sum,
    }
)
"""Operators that autocast runs in float32."""


class Precision(TorchFunctionMode):
    """Autocast on a GPU at ``dtype``, for tensors of the meta device; only attention's shape in float32.

    ``attention_flops`` grows by the work of each attention: the ledger cannot see a kernel that is none.
    """

    def __init__(self, dtype: torch.dtype, ledger: Ledger) -> None:
        super().__init__()
        self.dtype = dtype
        self.ledger = ledger

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self.dtype != torch.float32:
            if func in LOW:
                args, kwargs = _cast(args, self.dtype), _cast(kwargs, self.dtype)
            elif func in FULL:
                args, kwargs = _cast(args, torch.float32), _cast(kwargs, torch.float32)
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> Tensor:
        lower = [query, key, value]
        if self.dtype != torch.float32:
            lower = [_cast(one, self.dtype) for one in lower]
        out: Tensor = Attention.apply(*lower)  # type: ignore[no-untyped-call]
        work = attention_flops(query, key, value)
        self.ledger.flops += work
        if out.requires_grad:
            out.register_hook(_Adds(self.ledger, 2 * work))
        return out


class _Adds:
    """Hook that adds the work of a backward pass when it happens."""

    def __init__(self, ledger: Ledger, work: float) -> None:
        self.ledger = ledger
        self.work = work

    def __call__(self, grad: Tensor) -> None:
        self.ledger.flops += self.work


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    """Return the work of queries by keys and of weights by values; a backward pass costs twice that."""
    rows = query.numel() // query.shape[-1]
    return 2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, inside tuples, lists and mappings too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_cast(one, dtype) for one in value)
    if isinstance(value, Mapping):
        return {name: _cast(one, dtype) for name, one in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a computation takes beyond what was there. ``kept``: bytes alive after a forward, for its backward.

    ``peak``: most bytes at once. ``reserved``: what an allocator of its own takes from a GPU to hand them out, of
    forwards without gradient. ``forward_flops``, ``backward_flops``: matrix products of each.
    """

    peak: int
    kept: int = 0
    reserved: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0


@contextmanager
def observed(
    dtype: torch.dtype, *, reordered: bool = False, segments: Segments | None = None
) -> Iterator[Ledger]:
    """Follow what runs inside, with the precision that autocast at ``dtype`` would give it."""
    ledger = Ledger(reordered=reordered, segments=segments)
    with Precision(dtype, ledger), ledger:
        yield ledger


def inference_footprint(
    forward: Callable[[], object], dtype: torch.dtype, *, reordered: bool = False
) -> Footprint:
    """Return what a forward without gradient takes; ``reordered`` as ``Ledger`` has it."""
    segments = Segments()
    with torch.no_grad(), observed(dtype, reordered=reordered, segments=segments) as ledger:
        forward()
    return Footprint(peak=ledger.peak, reserved=segments.reserved, forward_flops=ledger.flops)


def training_footprint(forward: Callable[[], Sequence[Tensor]], dtype: torch.dtype) -> Footprint:
    """Return what a forward and its backward take, the gradients of parameters included.

    ``forward`` returns the outputs that a loss is made of.
    """
    with observed(dtype) as ledger:
        outputs = forward()
        kept, first = ledger.live, ledger.flops
        grads = [torch.empty_like(output) for output in outputs]
        torch.autograd.backward(list(outputs), grads)
        work = ledger.flops - first
    return Footprint(peak=ledger.peak, kept=kept, forward_flops=first, backward_flops=work)


def checkpointed(block: Callable[..., Any], *args: Any) -> Any:
    """Run a block as ``torch.utils.checkpoint`` does; its second forward has the precision of the first.

    Autograd calls the second forward outside the mode in which the first ran.
    """
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Precision)]

    def contexts() -> tuple[Any, Any]:
        again = Precision(modes[-1].dtype, modes[-1].ledger) if modes else nullcontext()
        return nullcontext(), again

    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)
