"""diffusers' files of every generation, and the one that drl writes, read by diffusers itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer, baked, converted
from drl.formats.diffusers_file import (
    METADATA,
    diffusers_tensors,
    prefix_of,
    read_diffusers,
    refuse_others,
    state_of_keys,
)
from drl.formats.read import read_adapter, read_tensors

MakeLayer = Callable[..., AdapterLayer]
MakeAdapter = Callable[..., Adapter]
CASES = ("sd3_plain", "sd3_patterns_rslora", "sd3_alpha_eq_r")
WITH_STRENGTH = ("save_lora_adapter", "save_lora_weights", "peft_pair")


def pair(path: str, *, names: tuple[str, str], rank: int = 2) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{names[0]}": torch.ones(rank, 4),
        f"{path}.{names[1]}": torch.ones(6, rank),
    }


MODERN = ("lora_A.weight", "lora_B.weight")
OLD = ("lora.down.weight", "lora.up.weight")


@pytest.mark.parametrize(
    ("stem", "names", "path"),
    [
        ("transformer.blocks.0.to_q", MODERN, "blocks.0.to_q"),
        ("transformer.blocks.0.to_q", OLD, "blocks.0.to_q"),
        ("transformer.a.processor.to_q_lora", ("down.weight", "up.weight"), "a.to_q"),
        ("transformer.a.processor.to_out_lora", ("down.weight", "up.weight"), "a.to_out.0"),
        ("transformer.a.processor.add_k_proj_lora", ("down.weight", "up.weight"), "a.add_k_proj"),
    ],
)
def test_every_generation_of_keys(stem: str, names: tuple[str, str], path: str) -> None:
    with pytest.warns(UserWarning, match=r"scale 1.0, as in diffusers"):
        adapter = read_diffusers(pair(stem, names=names), {})
    assert list(adapter.components["transformer"]) == [path]
    assert adapter.components["transformer"][path].scale == 1


def test_components_come_from_the_keys() -> None:
    tensors = {
        f"{name}.x.lora_{matrix}.weight": torch.ones(2, 2)
        for name in ("transformer", "transformer_2", "text_encoder")
        for matrix in "AB"
    }
    assert prefix_of(tensors) == ("transformer.", "transformer_2.", "text_encoder.")
    with pytest.warns(UserWarning, match="scale 1.0"):
        adapter = read_diffusers(tensors, {})
    assert set(adapter.components) == {"transformer", "transformer_2", "text_encoder"}


@pytest.mark.parametrize(("given", "name"), [(None, "transformer"), ("unet", "unet")])
def test_a_file_without_components_belongs_to_the_one_that_is_given(
    given: str | None, name: str
) -> None:
    with pytest.warns(UserWarning, match="scale 1.0"):
        adapter = read_diffusers(pair("blocks.0.to_q", names=MODERN), {}, component=given)
    assert adapter.single == name


def test_alphas_of_the_legacy_route_are_the_strength() -> None:
    tensors = pair("transformer.x", names=MODERN) | {"transformer.x.alpha": torch.tensor(8.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = read_diffusers(tensors, {})
    assert adapter.components["transformer"]["x"].scale == 4


def described(**fields: Any) -> dict[str, str]:
    full = {"r": 2, "lora_alpha": 6, "target_modules": ["x"], **fields}
    return {METADATA: json.dumps({f"transformer.{key}": value for key, value in full.items()})}


def test_the_strength_is_that_of_the_metadata() -> None:
    adapter = read_diffusers(pair("transformer.x", names=MODERN), described())
    assert adapter.components["transformer"]["x"].scale == 3
    assert adapter.configs["transformer"].target_modules == ("x",)


def test_metadata_and_alphas_together_are_refused() -> None:
    tensors = pair("transformer.x", names=MODERN) | {"transformer.x.alpha": torch.tensor(8.0)}
    with pytest.raises(BadInput, match="gives the strength twice"):
        read_diffusers(tensors, described())


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({METADATA: "{"}, "is no JSON"),
        ({METADATA: "[]"}, "holds a JSON list"),
        (described(r=3), "rank mismatch at x"),
        (described(use_dora=True), "use_dora"),
        (described(lora_alpha="8"), "lora_alpha"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(metadata: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_diffusers(pair("transformer.x", names=MODERN), metadata)


@pytest.mark.parametrize(
    "key", ["transformer.x.dora_scale", "transformer.x.bias", "transformer.x.lora_A.default.weight"]
)
def test_a_key_that_is_not_used_is_an_error(key: str) -> None:
    tensors = pair("transformer.x", names=MODERN) | {key: torch.ones(1)}
    with pytest.raises(BadInput, match="belong to no LoRA pair") as caught:
        read_diffusers(tensors, {})
    assert key.removeprefix("transformer.") in str(caught.value)


def test_one_module_in_two_spellings_is_an_error() -> None:
    with pytest.raises(BadInput, match="a module twice"):
        state_of_keys(pair("x", names=MODERN) | pair("x", names=OLD))


def test_half_a_pair_is_an_error() -> None:
    tensors = pair("transformer.x", names=MODERN)
    del tensors["transformer.x.lora_B.weight"]
    with pytest.raises(BadInput, match=r"without both matrices: x.lora_B.weight"):
        read_diffusers(tensors, {})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("folder", WITH_STRENGTH)
def test_golden_files_have_their_ranks_and_strengths(case: str, folder: str, golden: Path) -> None:
    place = golden / "diffusers-0.42.1" / case
    wrapped = json.loads((place / "case.json").read_text())["wrapped"]
    layers = read_adapter(place / folder).components["transformer"]
    assert set(layers) == set(wrapped)
    for path, layer in layers.items():
        assert layer.rank == wrapped[path]["r"]
        assert layer.scale == pytest.approx(wrapped[path]["scale"], rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_without_metadata_the_scale_is_1_as_in_diffusers(case: str, golden: Path) -> None:
    folder = golden / "diffusers-0.42.1" / case / "save_lora_weights_no_metadata"
    with pytest.warns(UserWarning, match=r"run at scale 1.0"):
        adapter = read_adapter(folder)
    assert {layer.scale for layer in adapter.components["transformer"].values()} == {1.0}


def output_of(model: nn.Module, place: Path) -> tuple[torch.Tensor, torch.Tensor]:
    io = load_file(place / "io.safetensors")
    inputs = {key: value for key, value in io.items() if not key.startswith("y_")}
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0], io["y_active"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bake", [False, True], ids=["metadata", "baked"])
def test_diffusers_runs_what_drl_writes_at_the_right_strength(
    case: str, bake: bool, golden: Path, golden_sd3: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    place = golden / "diffusers-0.42.1" / case
    adapter = read_adapter(place / "save_lora_weights")
    tensors, metadata = diffusers_tensors(baked(adapter) if bake else adapter)
    if bake:
        metadata = {}  # what a reader sees that knows no metadata
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt", **metadata})
    golden_sd3.load_lora_adapter(tmp_path, weight_name="w.safetensors", prefix="transformer")
    output, wanted = output_of(golden_sd3, place)
    assert (output - wanted).abs().max() <= 1e-4


def test_two_components_in_one_file_load_by_their_prefix(
    golden: Path, golden_sd3: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    place = golden / "diffusers-0.42.1"
    first = read_adapter(place / "sd3_patterns_rslora" / "save_lora_weights")
    second = read_adapter(place / "sd3_plain" / "save_lora_weights")
    both = Adapter(
        components={
            "transformer": first.components["transformer"],
            "transformer_2": second.components["transformer"],
        },
        configs={
            "transformer": first.configs["transformer"],
            "transformer_2": second.configs["transformer"],
        },
        boundary_ratio=0.5,
    )
    tensors, metadata = diffusers_tensors(both)
    file = tmp_path / "both.safetensors"
    save_file(tensors, file, metadata={"format": "pt", **metadata})
    again = read_diffusers(*read_tensors(file))
    assert again.boundary_ratio == 0.5
    assert again.configs["transformer"].use_rslora
    golden_sd3.load_lora_adapter(tmp_path, weight_name=file.name, prefix="transformer_2")
    output, wanted = output_of(golden_sd3, place / "sd3_plain")
    assert (output - wanted).abs().max() <= 1e-4


def test_other_trained_tensors_are_refused_by_name(make_layer: MakeLayer) -> None:
    adapter = Adapter(
        components={"transformer": {"x": make_layer((4, 4))}},
        others={"transformer": {"proj_out.weight": torch.ones(1)}},
    )
    with pytest.raises(BadInput, match=r"transformer.proj_out.weight .* --format peft or merged"):
        refuse_others(adapter, "a diffusers file")
    with pytest.raises(BadInput, match="LoRA matrices only"):
        diffusers_tensors(adapter)


def test_baked_half_precision_is_rounded_once(make_adapter: MakeAdapter) -> None:
    adapter = converted(make_adapter({"x": (6, 4)}, alpha=3.0), torch.bfloat16)
    layer, done = (
        adapter.components["transformer"]["x"],
        baked(adapter).components["transformer"]["x"],
    )
    assert (done.alpha, done.scale) == (2.0, 1.0)
    assert torch.equal(done.B, (layer.B.float() * 1.5).bfloat16())
    assert torch.equal(done.A, layer.A)
