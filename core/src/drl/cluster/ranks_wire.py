"""Messages between the driver and the processes of its ranks, as bytes.

A tensor travels as the bytes of its elements: not as the storage behind it, which may be that of a whole
rollout, and not through shared memory, which containers keep small. Memory that several tensors show
is sent once.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended: what a person reads, when (``time.monotonic``), and the exit code it asks for."""

    rank: int
    text: str
    moment: float
    exit_code: int = 1


class Line:
    """One end of a pipe; threads may send at the same time."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message; raises OSError when nobody is at the other end."""
        content = dumps(message)
        with self._lock:
            self.connection.send_bytes(content)

    def receive(self) -> Any:
        """Wait for a message; raises EOFError when the other end is gone."""
        return pickle.loads(self.connection.recv_bytes())


def dumps(message: object) -> memoryview:
    """Return a message as bytes that ``pickle.loads`` turns back, on the CPU."""
    stream = io.BytesIO()
    _Pickler(stream).dump(message)
    return stream.getbuffer()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self._sent: dict[tuple[object, ...], numpy.ndarray[Any, Any]] = {}

    def reducer_override(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Say how tensors are taken apart."""
        if isinstance(value, Tensor):
            return _tensor, (self._elements(value), value.dtype, tuple(value.shape))
        return NotImplemented  # type: ignore[no-any-return]  # as pickle wants it

    def _elements(self, tensor: Tensor) -> numpy.ndarray[Any, Any]:
        # pickle sends an array object once, however often it is met
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._sent:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._sent[key] = flat.view(torch.uint8).numpy()
        return self._sent[key]


def _tensor(
    elements: numpy.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    return torch.from_numpy(elements).view(dtype).reshape(shape)
