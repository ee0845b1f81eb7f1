"""`LoraLinear`: a frozen Linear plus a trainable low-rank update (lora.md 2.1)."""

from __future__ import annotations

import torch
from torch import nn

ADAPTER = "default"


class LoraLinear(nn.Module):
    """``y = W x + b + scale * B(A(dropout(x)))`` with ``W`` and ``b`` in ``base_layer``.

    ``lora_A`` and ``lora_B`` map an adapter name to a bias-free Linear, as in PEFT, so parameter
    names are ``<fqn>.lora_A.default.weight`` [rank, in] and ``<fqn>.lora_B.default.weight``
    [out, rank]. Both are left uninitialised on the base weight's device (meta included);
    ``drl.lora.reset_adapters`` fills them.
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        *,
        rank: int,
        alpha: float,
        scale: float,
        init: str,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = base_layer.weight.device
        self.base_layer = base_layer
        self.lora_dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        down = _bare_linear(base_layer.in_features, rank, device, dtype)
        up = _bare_linear(rank, base_layer.out_features, device, dtype)
        self.lora_A = nn.ModuleDict({ADAPTER: down})
        self.lora_B = nn.ModuleDict({ADAPTER: up})
        self.rank = rank
        self.alpha = alpha
        # A python float, never a buffer: a buffer is garbage after to_empty and rounded in bf16.
        self.scale = scale
        self.init = init
        self.off_depth = 0

    @property
    def down(self) -> nn.Parameter:
        """A [rank, in]."""
        return self.lora_A[ADAPTER].weight  # type: ignore[return-value]

    @property
    def up(self) -> nn.Parameter:
        """B [out, rank]."""
        return self.lora_B[ADAPTER].weight  # type: ignore[return-value]

    # Code around a Linear reads these (for example ``proj.weight.dtype`` in diffusers blocks).
    @property
    def weight(self) -> torch.Tensor:
        """The base weight [out, in], without the update."""
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The base bias [out]."""
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        """Input size."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """Output size."""
        return self.base_layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in] to [..., out] in the base layer's output dtype."""
        base: torch.Tensor = self.base_layer(x)
        if self.off_depth > 0:
            return base
        to_hidden, to_out = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        hidden = to_hidden(self.lora_dropout(_match_dtype(x, self.down.dtype)))
        delta: torch.Tensor = to_out(hidden) * self.scale
        return base + delta.to(base.dtype)

    def extra_repr(self) -> str:
        """Show rank and scale in the model's printout."""
        return f"rank={self.rank}, alpha={self.alpha}, scale={self.scale}"


def _bare_linear(
    in_features: int, out_features: int, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    # Built on meta first: nn.Linear's own init would draw from the global generator.
    linear = nn.Linear(in_features, out_features, bias=False, device="meta", dtype=dtype)
    return linear.to_empty(device=device)


def _match_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    device_type = x.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return x
    return x.to(dtype)
