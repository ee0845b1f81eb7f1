"""The layout of a base model, from a folder's headers and from a live module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drl.errors import BadInput
from drl.formats.layout import (
    boundary_ratio,
    component_layout,
    local_pipeline,
    module_layout,
    pipeline_layout,
    weight_files,
)
from drl.lora import LoraConfig, inject

MakePipeline = Callable[..., Path]
SHAPES = {"mid.to_q": (6, 4), "conv_in": (4, 3, 3, 3)}


def test_weights_that_can_be_adapted_by_component(
    tmp_path: Path, make_pipeline: MakePipeline
) -> None:
    folder = make_pipeline(tmp_path / "p", {"transformer": SHAPES, "text_encoder": {"q": (2, 2)}})
    layout = pipeline_layout(folder)
    assert layout["transformer"].weights == SHAPES
    assert layout["transformer"].class_name == "Toy"
    assert layout["text_encoder"].weights == {"q": (2, 2)}
    assert set(layout) == {"transformer", "text_encoder"}


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "Big"}')
    stem = "diffusion_pytorch_model"
    names = [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({"a.weight": torch.zeros(2, 3)}, tmp_path / names[0])
    save_file({"b.weight": torch.zeros(4, 5)}, tmp_path / names[1])
    index = {"weight_map": {"a.weight": names[0], "b.weight": names[1]}}
    (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == names
    assert component_layout(tmp_path).weights == {"a": (2, 3), "b": (4, 5)}


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    stem = "diffusion_pytorch_model"
    index = {"weight_map": {"a.weight": "../../elsewhere.safetensors"}}
    (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "elsewhere.safetensors"]


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_without_a_map_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadInput, match="weight_map"):
        weight_files(tmp_path)


def test_a_live_module_has_the_layout_of_its_files_adapted_or_not() -> None:
    module = nn.ModuleDict(
        {"mid": nn.Linear(4, 6), "norm": nn.LayerNorm(4), "out": nn.Linear(6, 2)}
    )
    before = module_layout(module)
    assert before.weights == {"mid": (6, 4), "out": (2, 6)}
    config = LoraConfig(rank=2, alpha=2, target_modules=("mid",))
    inject(module, config, generator=torch.Generator())
    assert module_layout(module).weights == before.weights


def test_a_folder_that_is_no_pipeline_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no pipeline: it has no model_index.json"):
        pipeline_layout(tmp_path)
    (tmp_path / "model_index.json").write_text("[1]")
    with pytest.raises(BadInput, match="holds a JSON list"):
        pipeline_layout(tmp_path)
    (tmp_path / "model_index.json").write_text('{"cut": ')
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        pipeline_layout(tmp_path)


@pytest.mark.parametrize(
    ("given", "value"), [(0.875, 0.875), (None, None), (True, None), ("x", None)]
)
def test_the_boundary_of_two_experts(
    tmp_path: Path, make_pipeline: MakePipeline, given: object, value: float | None
) -> None:
    folder = make_pipeline(tmp_path / "p", {"transformer": SHAPES}, extra={"boundary_ratio": given})
    assert boundary_ratio(folder) == value


@pytest.mark.parametrize("reference", ["./gone", "gone", "/gone/too", "~/gone", "a/b/c"])
def test_a_folder_that_is_not_there_is_never_looked_for_elsewhere(reference: str) -> None:
    with pytest.raises(BadInput, match=f"there is no folder {reference}"):
        local_pipeline(reference)


def test_a_folder_is_its_own_copy(tmp_path: Path) -> None:
    assert local_pipeline(str(tmp_path)) == tmp_path


HUB = """
import sys
from drl.errors import BadInput
from drl.formats.layout import local_pipeline
if sys.argv[1] == "without":
    sys.modules["huggingface_hub"] = None
try:
    local_pipeline("owner/never-there")
except BadInput as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("way", "words"),
    [("with", "cannot fetch owner/never-there from the hub"), ("without", "is not installed")],
)
def test_a_hub_id_that_cannot_be_fetched_says_what_to_give(way: str, words: str) -> None:
    pytest.importorskip("huggingface_hub")
    done = subprocess.run(
        [sys.executable, "-c", HUB, way],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert words in done.stdout, done.stderr
    assert "--base" in done.stdout
