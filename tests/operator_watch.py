"""Watches which operators run, and which of them make a host wait for its device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")


class Watch(TorchDispatchMode):
    """Counts operators; ``copies`` are those between devices, ``questions`` those that need a value."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.copies: list[str] = []
        self.questions: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).rpartition(".")[0]  # without its overload
        self.operators[name] += 1
        if name in ASKING:
            self.questions.append(name)
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in (*args, result) if isinstance(one, Tensor) and one.ndim]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.copies.append(name)
        return result
