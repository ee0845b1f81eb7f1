"""Two and more real processes in a gloo group, for tests of what ranks do together."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

Work = Callable[[int, int, Path], None]


def spawn(work: Work, world: int, folder: Path) -> None:
    """Run a module-level function on every rank; the first exception is raised here."""
    # a process that has used a GPU cannot be forked
    method = "spawn" if torch.cuda.is_initialized() else "fork"
    mp.start_processes(_rank, (work, world, folder), nprocs=world, start_method=method)


def _rank(rank: int, work: Work, world: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # a fork knows the shapes of shards that its parent had, maybe as another rank
    _clear_sharding_prop_cache()
    store = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        work(rank, world, folder)
    finally:
        dist.destroy_process_group()
