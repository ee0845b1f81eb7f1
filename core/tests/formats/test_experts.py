"""Models of two experts: both in one file, with their boundary, through every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drl.errors import BadInput
from drl.export import EXPORT_FORMATS, Wanted, export
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.layout import pipeline_layout
from drl.formats.peft_folder import write_peft_folder
from drl.formats.read import read_adapter

WEIGHTS = {f"blocks.{n}.attn1.to_{letter}": (6, 6) for n in (0, 1) for letter in "qkv"}
STEM = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def base(tmp_path: Path, make_pipeline: Callable[..., Path]) -> Path:
    return make_pipeline(
        tmp_path / "base",
        {"transformer": WEIGHTS, "transformer_2": WEIGHTS},
        class_name="WanTransformer3DModel",
        extra={"boundary_ratio": 0.875},
    )


@pytest.fixture
def source(tmp_path: Path, base: Path, make_layer: Callable[..., AdapterLayer]) -> Path:
    components = {
        name: {path: make_layer((6, 6), seed=seed, alpha=alpha) for path in WEIGHTS}
        for name, seed, alpha in (("transformer", 1, 4.0), ("transformer_2", 2, 1.0))
    }
    folder = tmp_path / "adapters"
    write_peft_folder(Adapter(components=components, base_model=str(base)), folder, None)
    return folder


def exported(source: Path, name: str, folder: Path, component: str | None = None) -> Path:
    out = folder / (f"{name}.safetensors" if name in ("kohya", "comfy") else f"out-{name}")
    return export(Wanted(source=source, format=name, out=out, component=component)).path


@pytest.mark.parametrize("name", ["peft", "diffusers", "kohya", "comfy"])
def test_both_experts_and_the_boundary_come_back(
    name: str, source: Path, base: Path, tmp_path: Path, assert_same: Callable[..., None]
) -> None:
    out = exported(source, name, tmp_path)
    again = read_adapter(out, layout=pipeline_layout(base))
    assert again.boundary_ratio == 0.875
    assert_same(read_adapter(source), again, 1e-6)
    scales = {c: {layer.scale for layer in one.values()} for c, one in again.components.items()}
    assert scales == {"transformer": {2.0}, "transformer_2": {0.5}}


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("kohya", {"transformer": "lora_unet_", "transformer_2": "lora_unet2_"}),
        ("comfy", {"transformer": "diffusion_model.", "transformer_2": "diffusion_model_2."}),
        ("diffusers", {"transformer": "transformer.", "transformer_2": "transformer_2."}),
    ],
)
def test_prefixes_and_the_header_entry(
    name: str, prefixes: dict[str, str], source: Path, tmp_path: Path
) -> None:
    from drl.formats.headers import read_header

    out = exported(source, name, tmp_path)
    header = read_header(out / "pytorch_lora_weights.safetensors" if out.is_dir() else out)
    bundle = json.loads(header.metadata["drl_bundle"])
    assert bundle == {"version": 1, "components": prefixes, "boundary_ratio": 0.875}
    for prefix in prefixes.values():
        assert sum(key.startswith(prefix) for key in header.tensors) >= 12


def test_wan_files_have_the_names_of_its_repository(source: Path, tmp_path: Path) -> None:
    tensors = load_file(exported(source, "comfy", tmp_path))
    assert "diffusion_model_2.blocks.1.self_attn.q.lora_A.weight" in tensors


def test_merging_changes_both(source: Path, base: Path, tmp_path: Path) -> None:
    out = exported(source, "merged", tmp_path)
    adapter = read_adapter(source)
    for name, layers in adapter.components.items():
        before, after = load_file(base / name / STEM), load_file(out / name / STEM)
        for path, layer in layers.items():
            B, A = layer.factors()
            wanted = before[f"{path}.weight"].double() + B @ A
            torch.testing.assert_close(after[f"{path}.weight"].double(), wanted, rtol=0, atol=2e-6)
    assert json.loads((out / "model_index.json").read_text())["boundary_ratio"] == 0.875


def test_one_expert_alone(source: Path, base: Path, tmp_path: Path) -> None:
    out = exported(source, "kohya", tmp_path, component="transformer_2")
    keys = load_file(out)
    assert all(key.startswith("lora_unet2_") for key in keys)
    again = read_adapter(out, layout=pipeline_layout(base))
    assert again.single == "transformer_2"
    peft = exported(source, "peft", tmp_path, component="transformer_2")
    assert read_adapter(peft).single == "transformer_2"


@pytest.mark.parametrize("name", EXPORT_FORMATS)
def test_a_base_with_one_expert_is_another_base(
    name: str, source: Path, tmp_path: Path, make_pipeline: Callable[..., Path]
) -> None:
    single = make_pipeline(tmp_path / "single", {"transformer": WEIGHTS})
    out = tmp_path / ("x.safetensors" if name in ("kohya", "comfy") else "x")
    with pytest.raises(BadInput, match="the base has no component 'transformer_2'"):
        export(Wanted(source=source, format=name, out=out, base=str(single)))
    assert not out.exists()
