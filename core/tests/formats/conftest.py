"""Toy pipelines on disk, seeded adapters, and the golden adapters that other tools wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.layout import ComponentLayout, module_layout

SEED = 7
# Paths as in diffusers' Stable Diffusion 3, so that the original names apply.
SD3_WEIGHTS = {
    "context_embedder": (8, 6),
    "transformer_blocks.0.attn.to_q": (8, 8),
    "transformer_blocks.0.attn.to_k": (8, 8),
    "transformer_blocks.0.attn.to_v": (8, 8),
    "transformer_blocks.0.attn.to_out.0": (8, 8),
    "transformer_blocks.0.attn.add_q_proj": (8, 8),
    "transformer_blocks.0.attn.add_k_proj": (8, 8),
    "transformer_blocks.0.attn.add_v_proj": (8, 8),
    "transformer_blocks.0.attn.to_add_out": (8, 8),
    "transformer_blocks.0.ff.net.0.proj": (32, 8),
    "transformer_blocks.0.ff.net.2": (8, 32),
    "norm_out.linear": (16, 8),
    "pos_embed.proj": (8, 4, 2, 2),
    "proj_out": (16, 8),
}
TOY_WEIGHTS = {"mid.to_q": (6, 4), "mid.to_out.0": (4, 6), "conv_in": (4, 3, 3, 3), "head": (5, 4)}


@pytest.fixture
def sd3_layout() -> dict[str, ComponentLayout]:
    return {"transformer": ComponentLayout(class_name="SD3Transformer2DModel", weights=SD3_WEIGHTS)}


@pytest.fixture
def toy_layout() -> dict[str, ComponentLayout]:
    return {"transformer": ComponentLayout(class_name="Toy", weights=TOY_WEIGHTS)}


@pytest.fixture
def make_layer() -> Callable[..., AdapterLayer]:
    """A seeded update of a weight of this shape."""

    def make(
        shape: tuple[int, ...], *, rank: int = 2, alpha: float = 4.0, seed: int = SEED
    ) -> AdapterLayer:
        generator = torch.Generator().manual_seed(seed)
        A = torch.randn(rank, *shape[1:], generator=generator)
        B = torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=generator)
        return AdapterLayer(A=A, B=B, alpha=alpha)

    return make


@pytest.fixture
def make_adapter(make_layer: Callable[..., AdapterLayer]) -> Callable[..., Adapter]:
    """A seeded adapter of these modules in one component."""

    def make(
        weights: Mapping[str, tuple[int, ...]],
        *paths: str,
        component: str = "transformer",
        seed: int = SEED,
        **settings: Any,
    ) -> Adapter:
        layers = {
            path: make_layer(weights[path], seed=seed + number, **settings)
            for number, path in enumerate(paths or weights)
        }
        return Adapter(components={component: layers})

    return make


def delta(layer: AdapterLayer) -> Tensor:
    """The update itself, float64, flattened to a matrix."""
    B, A = layer.factors()
    return B @ A


@pytest.fixture
def assert_same() -> Callable[[Adapter, Adapter], None]:
    """Two adapters have the same layers, each with the same update."""

    def check(first: Adapter, second: Adapter, tolerance: float = 1e-6) -> None:
        assert list(first.components) == list(second.components)
        for name, layers in first.components.items():
            assert set(layers) == set(second.components[name])
            for path, layer in layers.items():
                torch.testing.assert_close(
                    delta(layer), delta(second.components[name][path]), rtol=0, atol=tolerance
                )

    return check


@pytest.fixture
def make_pipeline() -> Callable[..., Path]:
    """Write a pipeline folder by hand: no model class is needed to read one."""

    def make(
        folder: Path,
        components: Mapping[str, Mapping[str, tuple[int, ...]]],
        *,
        class_name: str = "Toy",
        dtype: torch.dtype = torch.float32,
        extra: Mapping[str, Any] | None = None,
        tables: Mapping[str, Tensor] | None = None,
    ) -> Path:
        index: dict[str, Any] = {"_class_name": "ToyPipeline", **(extra or {})}
        for number, (name, weights) in enumerate(components.items()):
            generator = torch.Generator().manual_seed(number)
            part = folder / name
            part.mkdir(parents=True)
            stem = "model" if name.startswith("text_encoder") else "diffusion_pytorch_model"
            config = (
                {"architectures": [class_name]} if stem == "model" else {"_class_name": class_name}
            )
            (part / "config.json").write_text(json.dumps(config))
            tensors = {
                f"{path}.weight": torch.randn(shape, generator=generator).to(dtype)
                for path, shape in weights.items()
            }
            tensors |= {
                f"{path}.bias": torch.zeros(s[0], dtype=dtype) for path, s in weights.items()
            }
            save_file(
                {**tensors, **(tables or {})},
                part / f"{stem}.safetensors",
                metadata={"format": "pt"},
            )
            index[name] = ["toy", class_name]
        (folder / "scheduler").mkdir()
        (folder / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0}')
        index["scheduler"] = ["toy", "Scheduler"]
        index["safety_checker"] = [None, None]
        (folder / "model_index.json").write_text(json.dumps(index))
        return folder

    return make


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden adapters: ``DRL_GOLDEN``, or ``../shared/golden`` beside the repository."""
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "golden"
    root = Path(os.environ.get("DRL_GOLDEN", beside)) / "adapters"
    if not root.is_dir():
        pytest.skip(f"no golden adapters at {root}; set DRL_GOLDEN")
    return root


@pytest.fixture
def golden_sd3(golden: Path) -> nn.Module:
    """The Stable Diffusion 3 model that the golden adapters belong to."""
    diffusers = pytest.importorskip("diffusers")
    base = golden / "_bases" / "sd3"
    config = json.loads((base / "config.json").read_text())
    fields = {key: value for key, value in config.items() if not key.startswith("_")}
    model: nn.Module = diffusers.SD3Transformer2DModel(**fields)
    model.load_state_dict(load_file(base / "base.safetensors"), strict=True)
    return model.eval()


@pytest.fixture
def golden_layout(golden_sd3: nn.Module) -> dict[str, ComponentLayout]:
    return {"transformer": module_layout(golden_sd3)}
