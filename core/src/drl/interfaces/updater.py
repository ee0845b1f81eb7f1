"""``Updater``: carries trained weights to engines. Units, names, packing, merge and proof are core's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.types import Context

if TYPE_CHECKING:
    from torch import Tensor

    from drl.interfaces.engine import EngineCapabilities, EngineHandle, LoraFields


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """What decides which updater fits: what is trained, where everything runs, what engines can do.

    ``trained``: "full" or "adapters"; ``placement``: "same_process", "same_gpu", "other_gpu".
    """

    trained: str
    placement: str
    components: tuple[str, ...]
    uniform_adapters: bool = True
    engines: tuple[EngineCapabilities, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUnits:
    """One bucket's worth of whole units: pushed names and full tensors; ``lora`` for adapter buckets."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    lora: LoraFields | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push did, per component: tensors, buckets, bytes, and the names each engine answered with."""

    version: int
    component: str
    names: tuple[str, ...]
    buckets: int
    bytes: int
    checksum: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


class Updater(ABC):
    """Carries buckets to engines. ``context.section`` is the recipe's ``[sync]``.

    ``payload``: "dense" (full weights), "merged" (adapters merged by the trainer), "lora" (adapters,
    merged by the engine). ``transport``: one of the engine's transports.
    """

    payload: str
    transport: str

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def accepts(self, plan: SyncPlan) -> str | None:
        """Return None when it fits, else why not; ``sync.updater = "auto"`` asks each in turn."""

    @abstractmethod
    def connect(self, trainer: Context, engines: Sequence[EngineHandle]) -> None:
        """Be ready to push to these engines; called again whenever they changed."""

    @abstractmethod
    def push(self, component: str, buckets: Iterator[PackedUnits], version: int) -> PushReport:
        """Send every bucket of one component; every rank calls it and drains ``buckets``."""

    def close(self) -> None:
        """Let go of engines; a second call is harmless."""
        return
