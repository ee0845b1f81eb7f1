"""PEFT directories of one and of several components."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.detect import Format, detect
from drl.formats.peft_folder import read_peft_folder, write_peft_folder
from drl.lora import LoraConfig

MakeAdapter = Callable[..., Adapter]
AssertSame = Callable[..., None]
WEIGHTS = {"blocks.0.to_q": (6, 4), "blocks.1.to_q": (6, 4)}


def test_a_single_adapter_lies_at_the_root(
    tmp_path: Path, make_adapter: MakeAdapter, assert_same: AssertSame
) -> None:
    adapter = make_adapter(WEIGHTS, rank=3, alpha=1.5)
    write_peft_folder(adapter, tmp_path / "a", None)
    assert detect(tmp_path / "a") is Format.PEFT
    assert_same(adapter, read_peft_folder(tmp_path / "a"), 0)


@pytest.mark.parametrize("component", ["transformer", "unet", "transformer_2"])
def test_the_component_is_that_of_the_diffusers_file_beside(
    tmp_path: Path, make_adapter: MakeAdapter, component: str
) -> None:
    write_peft_folder(make_adapter(WEIGHTS, component=component), tmp_path / "a", None)
    assert read_peft_folder(tmp_path / "a").single == component
    (tmp_path / "a" / "pytorch_lora_weights.safetensors").unlink()
    assert read_peft_folder(tmp_path / "a").single == "transformer"
    assert read_peft_folder(tmp_path / "a", component="unet").single == "unet"


def test_several_components_have_a_folder_each_and_keep_their_boundary(
    tmp_path: Path, make_layer: Callable[..., AdapterLayer], assert_same: AssertSame
) -> None:
    adapter = Adapter(
        components={
            "transformer": {"x": make_layer((4, 4), seed=1)},
            "transformer_2": {"x": make_layer((4, 4), seed=2, rank=1)},
        },
        boundary_ratio=0.875,
        base_model="owner/wan",
    )
    write_peft_folder(adapter, tmp_path / "a", None)
    assert detect(tmp_path / "a") is Format.PEFT_COMPONENTS
    again = read_peft_folder(tmp_path / "a")
    assert_same(adapter, again, 0)
    assert (again.boundary_ratio, again.base_model) == (0.875, "owner/wan")


def test_biases_and_saved_modules_stay_with_it(
    tmp_path: Path, make_layer: Callable[..., AdapterLayer]
) -> None:
    config = LoraConfig(
        rank=2, alpha=4, target_modules=("x",), modules_to_save=("head",), bias="lora_only"
    )
    others = {"head.weight": torch.randn(3, 4), "x.base_layer.bias": torch.randn(4)}
    adapter = Adapter(
        components={"transformer": {"x": make_layer((4, 4))}},
        configs={"transformer": config},
        others={"transformer": others},
    )
    write_peft_folder(adapter, tmp_path / "a", None)
    again = read_peft_folder(tmp_path / "a")
    assert set(again.others["transformer"]) == set(others)
    for key, tensor in others.items():
        assert torch.equal(again.others["transformer"][key], tensor)
    assert again.configs["transformer"].modules_to_save == ("head",)


def test_damage_is_bad_input_and_names_the_place(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = tmp_path / "a"
    write_peft_folder(make_adapter(WEIGHTS), folder, None)
    fields = json.loads((folder / "adapter_config.json").read_text())
    for changed, words in (
        ({**fields, "r": 0}, r"rank \(r\) is 0|r is 0"),
        ({**fields, "use_dora": True}, "use_dora"),
        ({**fields, "peft_type": "IA3"}, "IA3"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(BadInput, match=words):
            read_peft_folder(folder)
