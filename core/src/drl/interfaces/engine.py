"""``Engine``: something that turns prompts into samples with trajectories, and takes new weights."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.interfaces.outline import EngineOutline
from drl.types import EMPTY, Context, RolloutRequest, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from drl.interfaces.family import Family
    from drl.interfaces.steps import SdeBackend


class Memory(enum.StrEnum):
    """What an engine releases and resumes."""

    WEIGHTS = "weights"
    REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do. ``proof``: the strongest of "counts", "names", "checksum".

    ``model_layout``: whose parameter names it takes. ``transactional``: a failed update leaves the
    old version. ``echoes``: request fields that come back with a sample; the others are checked from
    shapes and sigmas, or listed as unproven. ``sde_types``: values of ``sde.type`` that it samples with; empty
    before its start when it takes whatever it is launched with. ``path_seeds``: takes a second seed for step noise.
    ``debug_tensors``: fills ``Trajectory.debug`` where a request asks for it. ``shares_weights``: computes
    with the trainer's own frozen tensors (``Launch.shared``). ``sleeps``: gives memory back on ``release``.
    """

    model_layout: str = "diffusers"
    transports: frozenset[str] = frozenset()
    payloads: frozenset[str] = frozenset()
    can_mix_payloads: bool = True
    proof: str = "counts"
    transactional: bool = False
    echoes: frozenset[str] = frozenset()
    sde_types: frozenset[str] = frozenset()
    partial_trajectory: bool = False
    path_seeds: bool = False
    debug_tensors: bool = False
    batch_invariant: bool = False
    sleeps: bool = False
    aborts: bool = False
    shares_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How requests reach an engine that is a server, and what it changes in itself.

    ``router_max_connections``: open connections at most, over all engines. ``router_timeout_s``:
    seconds that one answer may take, None without limit. ``router_failure_threshold``: failed health
    checks in a row after which the router sends an engine nothing more. ``distributed_post``:
    requests are posted by processes on every node, not by the driver alone. ``parser_workers``: workers
    that turn answers into samples. ``patch_groups``: groups of patches to apply, of those that the
    engine's component states in its facts.
    """

    router_max_connections: int
    router_timeout_s: float | None = None
    router_failure_threshold: int = 3
    distributed_post: bool = False
    parser_workers: int = 1
    patch_groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an engine gets at start: model, devices, and the code that it may not import itself.

    ``family`` and ``sde_backends`` (by ``sde.type``) are instances for engines in this process;
    engines in another process build their own from ``checkpoint`` and the recipe. ``lora_targets``:
    per component, the layers whose adapters will be pushed as they are. ``server`` is set for an engine
    whose component states ``served`` in its facts, None for others.

    ``shared``: per component, the trainer's frozen tensors by plain name, for an engine in its process:
    to compute with and never to write; empty where there are none to share. ``parameter_dtypes``: per
    component, globs over parameter names to the dtype that these modules compute in.
    ``attention_backend``: the attention kernel by its name in diffusers. ``batched_guidance``: both
    predictions of guidance in one forward. ``prompts``: texts that are known to come, so that an engine
    may encode them ahead. ``pushes``: weights will come; False in a run that samples with the checkpoint's.
    """

    checkpoint: str
    family: Family
    sde_backends: Mapping[str, SdeBackend]
    components: tuple[str, ...] = ("transformer",)
    device: str = "cpu"
    dtype: str = "fp32"
    lora_targets: Mapping[str, tuple[str, ...]] = EMPTY
    server: ServerSettings | None = None
    shared: Mapping[str, Mapping[str, Tensor]] = EMPTY
    parameter_dtypes: Mapping[str, Mapping[str, str]] = EMPTY
    attention_backend: str | None = None
    batched_guidance: bool = False
    prompts: tuple[str, ...] = ()
    pushes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine is: address, ranks, GPU uuids, process ids."""

    address: str
    ranks: int = 1
    gpu_uuids: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """A broadcast group that trainer and engines share."""

    name: str
    address: str
    world: int
    first_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFields:
    """Rank and alpha of a pushed adapter, from the adapter itself."""

    rank: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensors:
    """Carrier inside one process: the tensors themselves, in the order of the bucket's names."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some weights of one component. ``payload``: "dense" or "lora_merge"; dense never carries ``lora``.

    ``checksum``: hex digest of ``drl.mathematics.checksum.tensors_digest`` over names and bytes.
    """

    component: str
    version: int
    index: int
    payload: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    checksum: str
    carrier: LocalTensors
    lora: LoraFields | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What became of one bucket: names applied, expected names that were absent, names unknown."""

    applied: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProof:
    """What an engine holds after an update, per component.

    ``checksums``: digest over the names and bytes that the last update brought, given only when each
    is held in the dtype that the engine stores; ``counts``: how many tensors it wrote;
    ``model_checksums``: a fingerprint of the whole model as stored, to see that it changed. ``unchanged``:
    components whose model is as it was before although all that came is held: in the dtype that the engine
    stores, the new values are the old ones. An engine that cannot tell leaves it empty.
    """

    version: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    model_checksums: Mapping[str, str] = field(default_factory=dict)
    unchanged: frozenset[str] = frozenset()


class Engine(ABC):
    """Something that turns prompts into samples with trajectories. One object per engine.

    Constructed as ``Engine(options, context)``; ``context.section`` is the recipe's ``[rollout]``.
    """

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """Return what it can do: before ``start`` as promised, after it as found."""

    @abstractmethod
    async def start(self, launch: Launch) -> EngineInfo:
        """Load the model and be ready for requests."""

    @abstractmethod
    async def health(self, timeout_s: float) -> None:
        """Return when alive; raise EngineDead with the last log lines otherwise."""

    @abstractmethod
    async def generate(self, request: RolloutRequest) -> list[Sample]:
        """Make one microgroup, in the order of its seeds; each sample carries the version that made it."""

    async def join(self, group: WeightGroup) -> None:
        """Join a broadcast group; engines without that transport are never asked."""
        raise NotImplementedError(f"{type(self).__name__} has no broadcast transport")

    async def leave(self, group: WeightGroup) -> None:
        """Leave a broadcast group; a no-op when unknown."""
        return

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Stop taking requests and wait for running ones."""

    @abstractmethod
    async def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        """Take one bucket; unknown names are reported, never ignored."""

    @abstractmethod
    async def end_update(self, version: int) -> WeightProof:
        """Prove what it holds; only now it serves again, as ``version``."""

    async def release(self, what: Memory) -> None:
        """Give memory back; a no-op for engines that cannot sleep."""
        return

    async def resume(self, what: Memory) -> None:
        """Take memory again: weights alone first, then the rest."""
        return

    def counts(self) -> Mapping[str, float]:
        """Return what it has counted since ``start``, by name; nothing by default.

        ``rows``: rows that went through the model, padding included; ``filler_rows``: the padding;
        ``recompilations``: graphs that were compiled after the warm-up. Each only ever grows.
        """
        return EMPTY

    def outline(self) -> EngineOutline | None:
        """Return how it will compute, from its options alone, for ``drl plan``; None when unknown."""
        return None

    @abstractmethod
    async def stop(self) -> None:
        """End; a second call is harmless."""


class EngineClient(ABC):
    """Blocking view of an engine's update protocol, for updaters."""

    @abstractmethod
    def begin_update(self, version: int) -> None: ...

    @abstractmethod
    def update_weights(self, bucket: WeightBucket) -> Acknowledgement: ...

    @abstractmethod
    def end_update(self, version: int) -> WeightProof: ...


CLIENTS: dict[str, EngineClient] = {}
"""Clients of engines that live in this process, by address; the pool registers them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandle:
    """A small picklable name of a running engine; ``open`` makes a client where it is held."""

    component: str
    address: str
    capabilities: EngineCapabilities
    ranks: int = 1
    gpu_uuids: Sequence[str] = ()

    def open(self) -> EngineClient:
        """Return a client; KeyError when the engine does not live in this process."""
        return CLIENTS[self.address]
