"""A small model with Linears, and the toy transformer of the golden adapters."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Four projections; ``to_out`` is a list with a Dropout, as in diffusers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.0)])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.to_q, self.to_k, self.to_v)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return self.to_out[1](self.to_out[0](mixed))


class FeedForward(nn.Module):
    """``net.0.proj``, tanh-GELU, ``net.2``."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        first = nn.Module()
        first.proj = nn.Linear(dim, inner)
        self.net = nn.ModuleList([first, nn.Dropout(0.0), nn.Linear(inner, dim)])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.net[2](F.gelu(self.net[0].proj(h), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each on a parameter-free layer norm."""

    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attn = Attention(dim, heads)
        self.ff = FeedForward(dim, inner)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.attn(F.layer_norm(h, h.shape[-1:]))
        return h + self.ff(F.layer_norm(h, h.shape[-1:]))


class Toy(nn.Module):
    """The toy module of ``golden/adapters/README.md``."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim = config["dim"]
        self.conv_in = nn.Conv2d(config["in_channels"], dim, 3, padding=1)
        self.label_emb = nn.Embedding(config["classes"], dim)
        self.weight_embed = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(
            [Block(dim, config["heads"], config["ff"]) for _ in range(config["blocks"])]
        )
        self.refiner = nn.Module()
        self.refiner.proj_out = nn.Linear(dim, dim)
        self.proj_out = nn.Linear(dim, dim)
        self.lora_head = nn.Linear(dim, config["head_out"])

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(x).flatten(2).transpose(1, 2) + self.label_emb(label)[:, None]
        h = h + torch.tanh(self.weight_embed(h))
        for block in self.blocks:
            h = block(h)
        h = h + self.refiner.proj_out(F.silu(h))
        return torch.cat([self.proj_out(h), self.lora_head(h)], dim=-1)


SMALL = {"dim": 8, "heads": 2, "blocks": 3, "ff": 12, "in_channels": 3, "classes": 4, "head_out": 5}


@pytest.fixture
def make_toy() -> Callable[..., Toy]:
    """A seeded toy; same seed, same weights."""

    def make(seed: int = 0, **changes: int) -> Toy:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Toy({**SMALL, **changes}).eval()

    return make


@pytest.fixture
def toy(make_toy: Callable[..., Toy]) -> Toy:
    return make_toy()


@pytest.fixture
def toy_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "x": torch.randn(2, 3, 4, 4, generator=generator),
        "label": torch.tensor([1, 3]),
    }


@pytest.fixture
def perturb() -> Callable[[nn.Module], None]:
    """Fill every B with seeded noise, so that the adapter does something."""

    def fill(module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(11)
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.3 * noise)

    return fill


@pytest.fixture
def train_a_little() -> Callable[[nn.Module], None]:
    """Add seeded noise to all that trains: matrices, biases, saved modules."""

    def move(module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(12)
        for parameter in module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_((0.3 * noise).to(parameter.dtype))

    return move


@pytest.fixture
def make_golden_base() -> Callable[[Path], nn.Module]:
    """Build a golden base model (toy or SD3) from its folder."""

    def make(folder: Path) -> nn.Module:
        config = json.loads((folder / "config.json").read_text())
        if config.get("kind") == "toy":
            model: nn.Module = Toy(config)
        else:
            diffusers = pytest.importorskip("diffusers")
            fields = {key: value for key, value in config.items() if not key.startswith("_")}
            model = diffusers.SD3Transformer2DModel(**fields)
        model.load_state_dict(load_file(folder / "base.safetensors"), strict=True)
        return model.eval()

    return make


@pytest.fixture
def golden_root() -> Path:
    """The golden adapters: ``DRL_GOLDEN``, or ``../shared/golden`` beside the repository."""
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "golden"
    root = Path(os.environ.get("DRL_GOLDEN", beside)) / "adapters"
    if not root.is_dir():
        pytest.skip(f"no golden adapters at {root}; set DRL_GOLDEN")
    return root


@pytest.fixture
def run_golden() -> Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]:
    """Run a base model on the inputs stored in a case's ``io.safetensors``."""

    def run(model: nn.Module, io: dict[str, torch.Tensor]) -> torch.Tensor:
        results = ("y_", "merged", "residual")
        inputs = {key: value for key, value in io.items() if not key.startswith(results)}
        with torch.no_grad():
            return model(**inputs) if "x" in inputs else model(**inputs, return_dict=False)[0]

    return run
