"""Compiled blocks: ``torch.compile`` of each repeated block of a model, for fixed shapes.

A model compiles block by block because its blocks share their graphs: 24 alike blocks cost one graph per
way of calling them (with gradients, without, adapters off). Every graph is counted. One that should not
have been needed is a fault that costs seconds each time, so it is said.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from drl.deterministic import deterministic_compilation
from drl.errors import BadInput

log = logging.getLogger(__name__)

GRAPH_LIMIT = 256
"""Graphs that one process may have of all its blocks; torch's own limit of 8 is used up by three kinds."""

SHAPES_PER_KIND = 8
"""Sets of input shapes and constants that one kind of block may have before more of them are a storm."""

GRAPHS = "compiled_graphs"
RECOMPILATIONS = "recompilations"

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Signature:
    """What one graph was compiled for.

    ``operators``: what it computes, without constants. ``code``: with them. ``inputs``: shape, strides,
    dtype, device and ``requires_grad`` of each tensor. ``mode``: gradients on, autocast on, modules in
    training mode.
    """

    operators: tuple[str, ...]
    code: str
    inputs: tuple[object, ...]
    mode: tuple[bool, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """A kind of block in one mode: what should have few graphs."""
        return self.operators, self.mode


class Compilations:
    """Counts the graphs of one model's blocks; ``label`` says whose they are: "trainer" or "engine".

    ``graphs``: compiled so far, ``seconds``: time the compiler took for them (a backward's own time comes
    on top), ``unexpected``: those that fixed shapes should have made needless. Unexpected is a graph equal
    to an earlier one, and each beyond ``SHAPES_PER_KIND`` of one kind. Another size, row count or mode is
    not, so there is nothing to mark as warm-up. ``backend`` is the name of a compiler that torch knows.
    """

    def __init__(self, label: str, backend: str = "inductor") -> None:
        self.label = label
        self.graphs = 0
        self.seconds = 0.0
        self.unexpected = 0
        self.modules: WeakSet[nn.Module] = WeakSet()
        self._seen: set[Signature] = set()
        self._kinds: Counter[tuple[object, ...]] = Counter()
        self._lock = Lock()
        self._told = (0, 0)
        self._compiler = torch._dynamo.lookup_backend(backend)
        # dynamo finds a graph again by the identity of this function: it must be one object
        self.backend: Backend = self._compile

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        signature = signature_of(graph, inputs, [module.training for module in self.modules])
        started = time.perf_counter()
        with deterministic_compilation():
            compiled: Callable[..., Any] = self._compiler(graph, list(inputs))
        self._count(signature, time.perf_counter() - started)
        return compiled

    def _count(self, signature: Signature, seconds: float) -> None:
        with self._lock:
            self.graphs += 1
            self.seconds += seconds
            again = signature in self._seen
            self._seen.add(signature)
            self._kinds[signature.kind] += 1
            number = self._kinds[signature.kind]
            if not again and number <= SHAPES_PER_KIND:
                return
            self.unexpected += 1
            first = self.unexpected == 1
        if first:
            log.warning("%s", self._remark(signature, again, number, seconds))

    def news(self) -> dict[str, float]:
        """Return what was compiled since the last call, as figures of an optimizer step."""
        with self._lock:
            (graphs, unexpected), self._told = self._told, (self.graphs, self.unexpected)
            return {
                f"train/{GRAPHS}": float(self.graphs - graphs),
                f"train/{RECOMPILATIONS}": float(self.unexpected - unexpected),
            }

    def _remark(self, signature: Signature, again: bool, number: int, seconds: float) -> str:
        shapes = ", ".join(str(one) for one in signature.inputs[:3])
        why = (
            "although an equal graph exists"
            if again
            else f"as number {number} of one kind, now for {shapes}"
        )
        return (
            f"{self.label}: a compiled block was compiled again {why} ({seconds:.1f} s); its shapes or "
            "settings change while they should be fixed. Later ones are counted, not told; "
            "TORCH_LOGS=recompiles prints each reason"
        )


def signature_of(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], training: Sequence[bool]
) -> Signature:
    """Return what a graph is compiled for; ``training``: the mode of the modules that are compiled."""
    return Signature(
        operators=tuple(f"{node.op} {node.target}" for node in graph.graph.nodes),
        code=graph.code,
        inputs=tuple(described(value) for value in inputs),
        mode=(
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            *training,
        ),
    )


def described(value: object) -> object:
    """Return what a graph is bound to in one of its inputs."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int | float) else type(value).__name__
    layout = tuple(value.shape), value.stride(), value.requires_grad
    return (*layout, str(value.dtype), str(value.device))


def compile_blocks(module: nn.Module, class_names: Sequence[str], log: Compilations) -> int:
    """Compile every outermost block of these classes in place; return how many.

    Nothing is computed yet: a graph is made at the first call of its kind. Call it on the thread that
    computes, after adapters are in the module and after sharding. A block that dynamo cannot trace as one
    graph raises there, rather than run in eager mode unnoticed. BadInput when no block is found, and
    for one that ranks gather in pieces.
    """
    blocks = outermost(module, class_names)
    if not blocks:
        found = sorted({type(child).__name__ for child in module.modules()})
        raise BadInput(
            f"compile: {type(module).__name__} has no module of class {', '.join(class_names) or '(none)'}, "
            f"which its family names as its blocks (TrainPipelineConfig.wrap); it has "
            f"{', '.join(found[:12])}. Set the compile option to false"
        )
    log.modules.add(module)
    limits = graph_limits()
    for block in blocks:
        check_whole(block)
        block.compile(fullgraph=True, dynamic=False, backend=log.backend, **limits)
    return len(blocks)


def check_whole(block: nn.Module) -> None:
    """Raise BadInput for a block with parts that are gathered apart: each would need a graph of its own."""
    parts = [name for name, part in block.named_modules() if name and isinstance(part, FSDPModule)]
    if parts:
        raise BadInput(
            f"train.compile: {parts[0]} inside a block has a dtype of its own (train.parameter_dtypes) and is "
            "gathered apart from it, in the middle of what should be one graph; keep the base whole "
            "(train.shard_frozen = 'never'), leave the dtype out, or set train.compile to false"
        )


def outermost(module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of these classes that lie in no other of them, in order."""
    found: list[nn.Module] = []
    for child in module.children():
        # a sharded module has a class of its own above its model's
        if any(kind.__name__ in class_names for kind in type(child).__mro__):
            found.append(child)
        else:
            found += outermost(child, class_names)
    return found


def graph_limits() -> dict[str, int]:
    """Raise dynamo's limit of graphs per function; return it where torch takes it by function."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": GRAPH_LIMIT}
    # torch before 2.12 has the setting alone
    torch._dynamo.config.recompile_limit = GRAPH_LIMIT
    return {}
