"""A net of two trained layers, with a moving average of them."""

from __future__ import annotations

import torch
from torch import nn

from drl.model.ema import Ema, EmaSettings
from drl.model.optimizers import trainable_parameters

FLAT = EmaSettings(decay_init=0.5, decay_ramp=0.1, decay_max=0.9, decay_flat_steps=1)


class Net(nn.Module):
    """Two layers, one of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x)) + self.table))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def ema_of(model: nn.Module, settings: EmaSettings = FLAT) -> Ema:
    return Ema(trainable_parameters({"net": model}), settings, models=(model,))


def one(value: float) -> tuple[nn.Parameter, Ema]:
    parameter = nn.Parameter(torch.tensor([value]))
    return parameter, Ema({"c.w": parameter}, FLAT)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def move(model: nn.Module, by: float = 0.25) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn_like(parameter))


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
