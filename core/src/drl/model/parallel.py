"""Ranks of one trainer: who a process is among N, how a component is sharded, how ranks agree.

Sharding is FSDP2 (``fully_shard``, Zhao et al. 2023, arXiv 2304.11277). A component with adapters keeps
every adapter whole on every rank: adapters are small, their gradients are summed once per optimizer step
in one collective, and the frozen base travels alone in one dtype. Frozen vectors stay whole too: they are
half of the parameters, hardly any of the bytes, and FSDP2's work on the host is by the parameter. A frozen
base that fits on every device is not sharded at all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from drl.errors import BadInput, ContractError
from drl.lora import adapter_names, base_names
from drl.mathematics.feeding import DTYPES
from drl.model.precision import (
    NONE,
    Overrides,
    overridden_leaves,
    overridden_tables,
    store_frozen,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of one trainer. A world of 1 has no mesh and no groups.

    ``mesh``: (shard,) or (replicate, shard). ``save_group``: a group of the CPU, for saves in the
    background alone. ``talk``: a group of the CPU for small objects. ``replicas``: copies of each shard.
    """

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    save_group: dist.ProcessGroup | None = None
    talk: dist.ProcessGroup | None = None
    replicas: int = 1

    def gather(self, value: Value) -> list[Value]:
        """Return the value of every rank, by rank, on every rank; collective. Values are pickled."""
        if self.talk is None:
            return [value]
        values: list[Value] = [value] * self.world
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def any(self, condition: bool) -> bool:
        """Return on every rank whether the condition holds on one of them; collective."""
        return any(self.gather(condition))

    def broadcast(self, value: Value | None) -> Value:
        """Return rank 0's value on every rank; collective. What other ranks give is ignored."""
        box = [value]
        if self.talk is not None:
            dist.broadcast_object_list(box, src=0, group=self.talk)
        (got,) = box
        assert got is not None
        return got


ALONE = Ranks()
"""The only rank of a trainer in one process."""


def shard(
    module: nn.Module,
    *,
    wrap: Sequence[str],
    mesh: DeviceMesh,
    forward_dtype: str,
    reduce_dtype: str = "fp32",
    cpu_offload: bool = False,
    frozen: str = "sharded",
    overrides: Overrides = NONE,
) -> None:
    """Shard a component over ``mesh`` in place: a group per module of a class in ``wrap``, one for the rest.

    Adapters must be in the module already. Parameters are gathered in ``forward_dtype``; gradients are
    summed over ranks in ``reduce_dtype``, not averaged, because rows are weighted by the whole window.
    With adapters, neighbours share a group, only matrices of the base are sharded, and all of it is stored
    in ``forward_dtype`` from now on: that is the precision in which it is gathered, so no forward changes.
    ``frozen`` "kept" keeps what a forward gathered for the backward, "whole" shards nothing of the base.
    ``overrides``: modules that are gathered in a dtype of their own, each in a group of its own. A module
    on the meta device stays there.
    Raises BadInput for a class that occurs nowhere, for an empty ``wrap``, and for a parameter with a dtype
    of its own that cannot have a group of its own.
    """
    groups = wrapped_modules(module, wrap)
    adapters = set(whole_parameters(module))
    if adapters:
        store_frozen(module, forward_dtype, overrides)
    if adapters and frozen == "whole":
        return
    check_groups(module, overrides)
    whole = set(unsharded_parameters(module))
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    parts: list[list[nn.Module]] = [[group] for group in groups]
    if adapters:
        parts = gathered_together(module, groups, GATHER_BYTES)
    default = DTYPES[forward_dtype]
    apart = [
        ([leaf], dtype)
        for leaf, dtype in overridden_leaves(module, overrides)
        if not whole.issuperset(leaf.parameters())
    ]
    for part, dtype in [*apart, *((part, default) for part in [*parts, [module]])]:
        fully_shard(
            part,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=DTYPES[reduce_dtype],
                cast_forward_inputs=False,
            ),
            offload_policy=offload,
            ignored_params=whole,
            # the root's group is needed again as soon as the backward begins
            reshard_after_forward=frozen != "kept" and part != [module],
        )
        made = part[0]  # modules of one group share its settings
        assert isinstance(made, FSDPModule)
        # plain sums; without this, gloo would be asked for an operation that it does not have
        made.set_force_sum_reduction_for_comms(True)
        made.set_gradient_divide_factor(1.0)


def wrapped_modules(module: nn.Module, wrap: Sequence[str]) -> list[nn.Module]:
    """Return the modules that get a group of their own, inner ones first; raises BadInput."""
    if not wrap:
        raise BadInput(
            f"{type(module).__name__}: its family names no classes to shard by "
            "(TrainPipelineConfig.wrap); use cluster.actor_num_gpus_per_node = 1"
        )
    found: dict[str, list[nn.Module]] = {name: [] for name in wrap}
    for child in module.modules():
        name = type(child).__name__
        if name in found and child is not module:
            found[name].append(child)
    absent = [name for name, modules in found.items() if not modules]
    if absent:
        classes = sorted({type(child).__name__ for child in module.modules()})
        raise BadInput(
            f"{type(module).__name__} has no module of class {', '.join(absent)}, which its family wants "
            f"to shard by (TrainPipelineConfig.wrap); it has {', '.join(classes[:12])}"
        )
    chosen = {id(part) for modules in found.values() for part in modules}
    order = [child for child in module.modules() if id(child) in chosen]
    return order[::-1]


GATHER_BYTES = 2**30
"""Most bytes of a frozen base that are gathered at once, unless one module is larger alone."""


def gathered_together(
    module: nn.Module, groups: Sequence[nn.Module], limit: int
) -> list[list[nn.Module]]:
    """Join neighbours of one parent and class into groups of at most ``limit`` bytes, inner ones first.

    FSDP2's work on the host is by the group as well. A frozen base has no gradients that would have to
    wait for a whole group, so fewer and larger gathers cost nothing but the memory of one of them.
    """
    names = {id(child): name for name, child in module.named_modules()}
    joined: list[list[nn.Module]] = []
    place, size = None, 0
    for group in groups:
        parent = names[id(group)].rpartition(".")[0]
        bytes_here = sum(p.numel() * p.element_size() for p in group.parameters())
        if place == (parent, type(group)) and size + bytes_here <= limit:
            joined[-1].insert(0, group)
            size += bytes_here
        else:
            joined.append([group])
            place, size = (parent, type(group)), bytes_here
    return joined


def check_groups(module: nn.Module, overrides: Overrides) -> None:
    """Raise BadInput for a parameter with a dtype of its own that shares a group with others."""
    tables = overridden_tables(module, overrides)
    if tables:
        raise BadInput(
            f"train.parameter_dtypes: {tables[0]} lies beside other modules, so that ranks would gather "
            "it with theirs, in their dtype; leave it out, use cluster.actor_num_gpus_per_node = 1, or "
            "keep the base whole (train.shard_frozen = 'never')"
        )


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every rank keeps whole: those of adapters, trained or not."""
    if not adapter_names(module):
        return []
    base = base_names(module)
    return [parameter for name, parameter in module.named_parameters() if name not in base]


def unsharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return what ``shard`` leaves alone: adapters, and vectors of the base beside them."""
    adapters = set(whole_parameters(module))
    if not adapters:
        return []
    return [p for p in module.parameters() if p in adapters or p.ndim < 2]


FROZEN_SHARE = 0.25
"""The most of a device's memory that a frozen base may take to be kept whole there."""


def frozen_layout(module: nn.Module, *, wanted: str, forward_dtype: str, memory: int | None) -> str:
    """Return "whole", "kept" or "sharded" for the base of a component with adapters.

    ``wanted``: "auto", "always" or "never" shard it. ``memory``: bytes of the device; None (the CPU,
    which all ranks share) counts as too little. "kept": sharded, and gathered once a step, because a
    backward that gathers it again saves memory that is not scarce.
    """
    adapters = set(whole_parameters(module))
    if not adapters:
        return "sharded"
    if wanted == "never":
        return "whole"
    size = DTYPES[forward_dtype].itemsize
    base = sum(p.numel() for p in module.parameters() if p not in adapters) * size
    if memory is None or base > FROZEN_SHARE * memory:
        return "sharded"
    return "whole" if wanted == "auto" else "kept"


def reshard(modules: Iterable[nn.Module]) -> None:
    """Drop gathered parameters: after a forward without backward some are still whole.

    Until then ``named_parameters`` shows the gathered ones instead of those that are trained.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def sum_whole_gradients(
    parameters: Iterable[nn.Parameter], ranks: Ranks, reduce_dtype: str = "fp32"
) -> None:
    """Add the gradients of whole parameters up over ranks, in place, in one collective."""
    if ranks.world == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    if not grads:
        return
    flat = torch.cat([grad.detach().flatten() for grad in grads]).to(DTYPES[reduce_dtype])
    dist.all_reduce(flat)
    pieces = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(
        grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """How the ranks of a trainer find each other.

    ``device``: "cpu" or "cuda" (rank r is on cuda:r). ``timeout_s``: a collective that takes longer
    fails. ``cpu_backend``: what carries collectives of the CPU.
    """

    world: int
    device: str
    replicas: int = 1
    timeout_s: float = 600.0
    cpu_backend: str = "gloo"

    def device_of(self, rank: int) -> str:
        """Return the device of one rank; one rank alone is where the recipe says."""
        return self.device if self.world == 1 or self.device == "cpu" else f"cuda:{rank}"


def start_ranks(rank: int, settings: RankSettings, rendezvous: Path) -> Ranks:
    """Join the other ranks; every rank of the world calls this, and blocks until all have.

    ``rendezvous``: a file on a local disk that does not exist yet, the same for all. Ranks talk over the
    loopback interface alone. Raises ContractError when this process is in a process group already.
    """
    if dist.is_initialized():
        raise ContractError(
            "this process is in a torch.distributed process group already; start drl without torchrun"
        )
    on_cpu = settings.device == "cpu"
    cpu = settings.cpu_backend
    if not on_cpu:
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(
        cpu if on_cpu else f"cpu:{cpu},cuda:nccl",
        store=dist.FileStore(str(rendezvous), settings.world),
        rank=rank,
        world_size=settings.world,
        timeout=limit,
    )
    shape: tuple[int, ...] = (settings.world,)
    names: tuple[str, ...] = ("shard",)
    if settings.replicas > 1:
        shape = (settings.replicas, settings.world // settings.replicas)
        names = ("replicate", "shard")
    return Ranks(
        rank=rank,
        world=settings.world,
        mesh=init_device_mesh(settings.device, shape, mesh_dim_names=names),
        save_group=dist.new_group(backend=cpu, timeout=limit),
        talk=dist.new_group(backend=cpu, timeout=limit),
        replicas=settings.replicas,
    )


def stop_ranks() -> None:
    """Leave the other ranks; a second call is harmless, and so are ranks that are gone already."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_ranks(ranks: Ranks | None) -> None:
    """End collectives that wait for a rank that is gone: gloo notices by itself, NCCL waits for ever."""
    if ranks is None or ranks.mesh is None or ranks.mesh.device_type == "cpu":
        return
    for group in {dist.group.WORLD, *ranks.mesh.get_all_groups()}:
        if group is not None:
            group.abort()


@contextmanager
def loopback_only() -> Iterator[None]:
    """Let collectives use the loopback interface, unless the user chose one."""
    loops = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    added = [name for name in names if loops and name not in os.environ]
    os.environ.update(dict.fromkeys(added, loops[0] if loops else ""))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
