"""A component on N ranks: weights read by rank 0 or by all, parameters sharded, every buffer equal.

The ranks that read nothing build the module on the meta device. Start values of adapters are made on the
ranks that read, by the very code of one rank, and travel with the weights: they cannot depend on N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from drl.errors import BadInput, ContractError
from drl.lora.sharding import copy_into
from drl.model.parallel import Ranks, frozen_layout, shard, unsharded_parameters
from drl.model.precision import NONE, Overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """``load``: "broadcast" (rank 0 reads) or "all_ranks". Dtypes as "fp32", "bf16", "fp16".

    ``shard_frozen``: "auto", "always" or "never", for the base under adapters.
    """

    forward_dtype: str
    reduce_dtype: str
    cpu_offload: bool = False
    shard_frozen: str = "auto"
    load: str = "broadcast"

    def reads(self, ranks: Ranks) -> bool:
        """True when this rank reads weights from files."""
        return ranks.rank == 0 or self.load == "all_ranks"


@dataclass(frozen=True, slots=True)
class Slot:
    """What every rank must agree on about one parameter or buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


def spread(
    name: str,
    module: nn.Module,
    *,
    wrap: Sequence[str],
    ranks: Ranks,
    settings: ShardSettings,
    device: str,
    overrides: Overrides = NONE,
) -> None:
    """Shard a component over the ranks, in place; collective.

    ``module`` has its weights where ``settings.reads`` says so and is on the meta device elsewhere;
    adapters are injected, and what is trained is chosen. Raises ContractError, which names the
    parameter, when ranks built different modules; BadInput for tied parameters and unfit ``wrap``.
    """
    assert ranks.mesh is not None
    if not settings.reads(ranks):
        check_meta(name, module, ranks)
    check_untied(name, module)
    adopt_layout(name, module, ranks)
    weights = tensors_of(module) if settings.reads(ranks) else None
    frozen = ranks.broadcast(
        frozen_layout(
            module,
            wanted="always" if settings.cpu_offload else settings.shard_frozen,
            forward_dtype=settings.forward_dtype,
            # what is offloaded is to leave the device between forward and backward too
            memory=None if settings.cpu_offload else memory_of(device),
        )
    )
    # the whole module never sees the device: shards are made empty, then filled one by one
    torch.nn.Module.to(module, "meta")
    shard(
        module,
        wrap=wrap,
        mesh=ranks.mesh,
        forward_dtype=settings.forward_dtype,
        reduce_dtype=settings.reduce_dtype,
        cpu_offload=settings.cpu_offload,
        frozen=frozen,
        overrides=overrides,
    )
    make_empty(module, device, cpu_offload=settings.cpu_offload)
    fill(module, weights, device, alike=settings.load == "all_ranks")


def memory_of(device: str) -> int | None:
    """Return the bytes of a GPU; None for the CPU."""
    if not device.startswith("cuda"):
        return None
    total: int = torch.cuda.get_device_properties(torch.device(device)).total_memory
    return total


def check_meta(name: str, module: nn.Module, ranks: Ranks) -> None:
    """Raise ContractError for a parameter with storage on a rank that should not have read any."""
    real = [key for key, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise ContractError(
            f"{name}: {len(real)} parameters of rank {ranks.rank} are not on the meta device, for example "
            f"{real[0]}; Family.build must respect WeightSource.meta, or set model.load = 'all_ranks'"
        )


def check_untied(name: str, module: nn.Module) -> None:
    """Raise BadInput for a parameter with two names: sharding would part the two."""
    names: dict[int, str] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), key)
        if first != key:
            raise BadInput(
                f"{name}: {first} and {key} are one tied parameter, which cannot be sharded; "
                "use cluster.actor_num_gpus_per_node = 1"
            )


def adopt_layout(name: str, module: nn.Module, ranks: Ranks) -> None:
    """Take over rank 0's dtypes; raises ContractError when names, shapes or what is trained differ."""
    mine = layout_of(module)
    theirs = ranks.broadcast(mine if ranks.rank == 0 else None)
    for key in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(key), theirs.get(key)
        if here is None or there is None or without_dtype(here) != without_dtype(there):
            raise ContractError(
                f"{name}: rank {ranks.rank} built another module than rank 0; the first difference is "
                f"{key}: {here} here, {there} there"
            )
    for key, tensor in tensors_of(module).items():
        if tensor.dtype != theirs[key].dtype:
            tensor.data = tensor.data.to(theirs[key].dtype)


def without_dtype(slot: Slot) -> tuple[tuple[int, ...], bool]:
    """Return what a rank cannot take over from another."""
    return slot.shape, slot.trained


def layout_of(module: nn.Module) -> dict[str, Slot]:
    """Return shape, dtype and training of every parameter and buffer by name."""
    return {
        key: Slot(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for key, tensor in tensors_of(module).items()
    }


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and every buffer, also those that no state dict has."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def make_empty(module: nn.Module, device: str, *, cpu_offload: bool) -> None:
    """Give every tensor storage; with offloading only the shards stay on the CPU."""
    module.to_empty(device="cpu" if cpu_offload else device)
    if not cpu_offload:
        return
    for parameter in unsharded_parameters(module):
        parameter.data = parameter.data.to(device)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


@torch.no_grad()
def fill(
    module: nn.Module, weights: Mapping[str, Tensor] | None, device: str, *, alike: bool
) -> None:
    """Write whole tensors into shards, whole parameters and buffers.

    ``alike``: every rank has the weights and takes its part of them without communication. Otherwise
    rank 0 sends each tensor to all, one at a time.
    """
    for key, target in tensors_of(module).items():
        if weights is None:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        else:
            whole = weights[key].detach().to(device=device, dtype=target.dtype).contiguous()
        if not alike:
            dist.broadcast(whole, src=0)
        copy_into(target, whole)


def check_filled(name: str, module: nn.Module) -> None:
    """Raise ContractError for a tensor that is still on the meta device, plain attributes included."""
    plain = {
        f"{name}.{key}".lstrip("."): value
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, torch.Tensor)
    }
    empty = [key for key, tensor in (tensors_of(module) | plain).items() if tensor.is_meta]
    if empty:
        raise ContractError(
            f"{name}: {len(empty)} tensors have no values, for example {empty[0]}; Family.finish must "
            "make what Family.build does not register"
        )
