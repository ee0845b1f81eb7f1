"""Random numbers of the training step (dropout): a stream of their own, saved per rank.

Everything that drl draws comes from generators of ids; what is left to the global generators is what
modules draw in forward passes. The trainer's stream is put in place while it trains and taken away
after, so that nothing else, before or after a resume, can shift it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drl.errors import CheckpointError
from drl.mathematics.seeding import stream_seed

FOLDER = "rng"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The global generators: torch CPU, torch CUDA of one device (None without), Python, numpy.

    Tensors: uint8 of torch, int64 of Python's 625 and numpy's 624 words.
    """

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    python: torch.Tensor
    numpy: torch.Tensor
    rest: Mapping[str, Any]


def capture(device: torch.device) -> RandomState:
    """Return the present state of the global generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return RandomState(
        torch_cpu=torch.get_rng_state(),
        torch_cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        python=torch.tensor(words, dtype=torch.int64),
        numpy=torch.from_numpy(np.asarray(keys).astype(np.int64)),
        rest={
            "python_version": version,
            "python_gauss": gauss,
            "numpy_name": name,
            "numpy_position": int(position),
            "numpy_has_gauss": int(has_gauss),
            "numpy_gauss": float(cached),
        },
    )


def apply(state: RandomState, device: torch.device) -> None:
    """Put a state into the global generators; one without CUDA leaves the device's alone."""
    rest = state.rest
    torch.set_rng_state(state.torch_cpu)
    if device.type == "cuda" and state.torch_cuda is not None:
        torch.cuda.set_rng_state(state.torch_cuda, device)
    random.setstate((rest["python_version"], tuple(state.python.tolist()), rest["python_gauss"]))
    np.random.set_state(
        (
            rest["numpy_name"],
            state.numpy.numpy().astype(np.uint32),
            rest["numpy_position"],
            rest["numpy_has_gauss"],
            rest["numpy_gauss"],
        )
    )


def seeded(seed: int, device: torch.device) -> RandomState:
    """Return the state after seeding every generator with the same number; leaves them as they were."""
    before = capture(device)
    torch.random.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    made = capture(device)
    apply(before, device)
    return made


class TrainingRandomness:
    """The random numbers of one rank's training steps: a function of run seed and rank.

    ``state`` is what the next training will start from.
    """

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self.device = device
        self.state = seeded(stream_seed(seed, "training", rank), device)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the stream be what modules draw from; what was there before comes back after."""
        before = capture(self.device)
        apply(self.state, self.device)
        try:
            yield
        finally:
            self.state = capture(self.device)
            apply(before, self.device)


def rng_file(folder: Path, rank: int) -> Path:
    """Return the file of one rank in a checkpoint folder."""
    return folder / FOLDER / f"rank_{rank:05d}.safetensors"


def write_rng(state: RandomState, folder: Path, rank: int) -> None:
    """Write the state of one rank; the folder ``rng`` is made when it is missing."""
    file = rng_file(folder, rank)
    file.parent.mkdir(exist_ok=True)
    tensors = {"torch_cpu": state.torch_cpu, "python": state.python, "numpy": state.numpy}
    if state.torch_cuda is not None:
        tensors["torch_cuda"] = state.torch_cuda
    save_file(tensors, file, metadata={"rest": json.dumps(dict(state.rest), sort_keys=True)})


def read_rng(folder: Path, rank: int) -> RandomState | None:
    """Return the state of one rank, None when the checkpoint was made with fewer ranks.

    Raises CheckpointError for a file that is damaged.
    """
    file = rng_file(folder, rank)
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as stream:
            names = set(stream.keys())
            tensors = {name: stream.get_tensor(name) for name in names}
            rest = json.loads((stream.metadata() or {})["rest"])
        return RandomState(
            torch_cpu=tensors["torch_cpu"],
            torch_cuda=tensors.get("torch_cuda"),
            python=tensors["python"],
            numpy=tensors["numpy"],
            rest=rest,
        )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); set checkpoint.load_rng = false to go on without it"
        ) from error
