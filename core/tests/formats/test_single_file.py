"""kohya and ComfyUI files: every key used, the strength kept, everything else refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.layout import ComponentLayout
from drl.formats.read import read_tensors
from drl.formats.single_file import (
    BUNDLE,
    comfy_tensors,
    kohya_tensors,
    read_single_file,
)

Layout = dict[str, ComponentLayout]
MakeAdapter = Callable[..., Adapter]
AssertSame = Callable[..., None]
BUILDERS = {"kohya": kohya_tensors, "comfy": comfy_tensors}


def pair(name: str, shape: tuple[int, int] = (6, 4), **extra: Any) -> dict[str, torch.Tensor]:
    """One entry of a kohya file, of rank 2."""
    rows, columns = shape
    tensors = {
        f"{name}.lora_down.weight": torch.arange(2.0 * columns).reshape(2, columns),
        f"{name}.lora_up.weight": torch.arange(2.0 * rows).reshape(rows, 2),
        f"{name}.alpha": torch.tensor(4.0),
    }
    return {key: value for key, value in {**tensors, **extra}.items() if value is not None}


def test_matrices_and_scale_by_hand(toy_layout: Layout) -> None:
    adapter = read_single_file(pair("lora_unet_mid_to_q"), {}, toy_layout)
    layer = adapter.components["transformer"]["mid.to_q"]
    assert layer.A.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layer.B[:2].tolist() == [[0, 1], [2, 3]]
    assert (layer.rank, layer.alpha, layer.scale) == (2, 4, 2)


@pytest.mark.parametrize("alpha", [16, 0.5, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_alpha_may_have_any_dtype(toy_layout: Layout, alpha: float, dtype: torch.dtype) -> None:
    if dtype is torch.int64 and alpha == 0.5:
        pytest.skip("no integer")
    tensors = pair("lora_unet_mid_to_q")
    tensors["lora_unet_mid_to_q.alpha"] = torch.tensor(alpha, dtype=dtype)
    layer = read_single_file(tensors, {}, toy_layout).components["transformer"]["mid.to_q"]
    assert layer.scale == alpha / 2


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -1.0])
def test_an_alpha_that_is_no_strength_is_refused(toy_layout: Layout, alpha: float) -> None:
    tensors = pair("lora_unet_mid_to_q", **{"lora_unet_mid_to_q.alpha": torch.tensor(alpha)})
    with pytest.raises(BadInput, match=r"lora_unet_mid_to_q.alpha is .* finite"):
        read_single_file(tensors, {}, toy_layout)


def test_an_alpha_of_two_numbers_is_refused(toy_layout: Layout) -> None:
    tensors = pair("lora_unet_mid_to_q", **{"lora_unet_mid_to_q.alpha": torch.ones(2)})
    with pytest.raises(BadInput, match="must be one finite number"):
        read_single_file(tensors, {}, toy_layout)


def test_without_alpha_the_scale_is_1_and_that_is_said(toy_layout: Layout) -> None:
    tensors = pair("lora_unet_mid_to_q", **{"lora_unet_mid_to_q.alpha": None})
    with pytest.warns(UserWarning, match=r"1 of 1 modules have no alpha; they run at scale 1.0"):
        adapter = read_single_file(tensors, {}, toy_layout)
    assert adapter.components["transformer"]["mid.to_q"].scale == 1


@pytest.mark.parametrize(
    "key",
    [
        "lora_unet_mid_to_q.dora_scale",
        "lora_unet_mid_to_q.lora_mid.weight",
        "lora_unet_mid_to_q.hada_w1_a",
        "lora_unet_mid_to_q.diff",
        "lora_unet_.lora_down.weight",
        "mid.to_q.weight",
        "lora_mystery_x.lora_down.weight",
    ],
)
def test_a_key_that_is_not_used_is_an_error(toy_layout: Layout, key: str) -> None:
    with pytest.raises(BadInput, match="belong to no LoRA pair") as caught:
        read_single_file({**pair("lora_unet_mid_to_q"), key: torch.zeros(1)}, {}, toy_layout)
    assert key in str(caught.value)


@pytest.mark.parametrize("matrix", ["lora_down.weight", "lora_up.weight"])
def test_half_a_pair_is_an_error(toy_layout: Layout, matrix: str) -> None:
    tensors = pair("lora_unet_mid_to_q", **{f"lora_unet_mid_to_q.{matrix}": None})
    with pytest.raises(BadInput, match=r"without a matrix: lora_unet_mid_to_q"):
        read_single_file(tensors, {}, toy_layout)


def test_a_module_that_the_base_lacks_is_named(toy_layout: Layout) -> None:
    with pytest.raises(BadInput, match=r"no modules of the names lora_unet_mid_to_z"):
        read_single_file(
            {**pair("lora_unet_mid_to_q"), **pair("lora_unet_mid_to_z")}, {}, toy_layout
        )


def test_one_module_under_two_names_is_an_error(toy_layout: Layout) -> None:
    tensors = {**pair("lora_unet_mid_to_q"), **pair("diffusion_model.mid.to_q")}
    with pytest.raises(BadInput, match=r"two entries of the file adapt transformer.mid.to_q"):
        read_single_file(tensors, {}, toy_layout)
    both = {
        "diffusion_model.mid.to_q.lora_A.weight": torch.zeros(2, 4),
        **pair("diffusion_model.mid.to_q"),
    }
    with pytest.raises(BadInput, match="belong to no LoRA pair"):
        read_single_file(both, {}, toy_layout)


def test_text_encoders_that_the_base_has_are_read(toy_layout: Layout) -> None:
    text = ComponentLayout(class_name="Clip", weights={"layers.0.q_proj": (6, 4)})
    layout = {**toy_layout, "text_encoder": text, "text_encoder_2": text}
    tensors = {
        **pair("lora_te1_layers_0_q_proj"),
        **pair("lora_te2_layers_0_q_proj"),
        **pair("lora_unet_mid_to_q"),
    }
    adapter = read_single_file(tensors, {}, layout)
    assert set(adapter.components) == {"text_encoder", "text_encoder_2", "transformer"}


@pytest.mark.parametrize(("prefix", "name"), [("te1", "text_encoder"), ("te2", "text_encoder_2")])
def test_text_encoders_that_the_base_lacks_are_refused_by_name(
    toy_layout: Layout, prefix: str, name: str
) -> None:
    tensors = {**pair("lora_unet_mid_to_q"), **pair(f"lora_{prefix}_layers_0_q_proj")}
    with pytest.raises(
        BadInput, match=f"the text encoder '{name}'.*does not have; it has transformer"
    ):
        read_single_file(tensors, {}, toy_layout)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_round_trip_with_convolution_and_other_strengths(
    toy_layout: Layout, make_adapter: MakeAdapter, assert_same: AssertSame, build: Any
) -> None:
    weights = toy_layout["transformer"].weights
    adapter = make_adapter(weights, rank=3, alpha=5.5)
    tensors, metadata = build(adapter, toy_layout)
    again = read_single_file(tensors, metadata, toy_layout)
    assert_same(adapter, again, 0)
    assert all(layer.alpha == 5.5 for layer in again.components["transformer"].values())
    assert tensors[next(key for key in tensors if key.endswith(".alpha"))].dtype is torch.float32


def test_the_shapes_of_a_convolution_are_those_of_kohya(
    toy_layout: Layout, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights, "conv_in", rank=2)
    tensors, _ = kohya_tensors(adapter, toy_layout)
    assert tensors["lora_unet_conv_in.lora_down.weight"].shape == (2, 3, 3, 3)
    assert tensors["lora_unet_conv_in.lora_up.weight"].shape == (4, 2, 1, 1)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_original_names_with_fused_layers_round_trip(
    sd3_layout: Layout, make_adapter: MakeAdapter, assert_same: AssertSame, build: Any
) -> None:
    weights = sd3_layout["transformer"].weights
    paths = [path for path in weights if path != "norm_out.linear"]
    adapter = make_adapter(weights, *paths, rank=3, alpha=6)
    tensors, metadata = build(adapter, sd3_layout)
    assert_same(adapter, read_single_file(tensors, metadata, sd3_layout), 0)


def test_the_names_that_other_tools_look_for(sd3_layout: Layout, make_adapter: MakeAdapter) -> None:
    attention = "transformer_blocks.0.attn."
    paths = [attention + "to_q", attention + "to_v", attention + "to_out.0"]
    adapter = make_adapter(sd3_layout["transformer"].weights, *paths, rank=2, alpha=8)
    tensors, metadata = kohya_tensors(adapter, sd3_layout)
    qkv = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    assert {key.partition(".")[0] for key in tensors} == {
        qkv,
        "lora_unet_joint_blocks_0_x_block_attn_proj",
    }
    assert tensors[f"{qkv}.lora_up.weight"].shape == (24, 4)  # two parts of rank 2, three of 8 rows
    assert tensors[f"{qkv}.lora_up.weight"][8:16].count_nonzero() == 0  # k has no adapter
    assert float(tensors[f"{qkv}.alpha"]) == 16  # scale 4 at rank 4
    assert metadata == {
        "ss_network_module": "networks.lora",
        "ss_network_dim": "2",
        "ss_network_alpha": "8",
    }
    comfy, _ = comfy_tensors(adapter, sd3_layout)
    assert "diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_A.weight" in comfy


def test_a_module_without_an_original_name_is_refused(
    sd3_layout: Layout, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(sd3_layout["transformer"].weights, "norm_out.linear")
    with pytest.raises(BadInput, match=r"norm_out.linear .* no place"):
        kohya_tensors(adapter, sd3_layout)


def test_mixed_ranks_are_dynamic_in_the_header(toy_layout: Layout, make_layer: Any) -> None:
    weights = toy_layout["transformer"].weights
    layers = {
        "mid.to_q": make_layer(weights["mid.to_q"], rank=1),
        "head": make_layer(weights["head"], rank=2),
    }
    _, metadata = kohya_tensors(Adapter(components={"transformer": layers}), toy_layout)
    assert metadata["ss_network_dim"] == "Dynamic"
    assert metadata["ss_network_alpha"] == "4"


def test_a_fused_layer_of_another_width_belongs_to_another_base(sd3_layout: Layout) -> None:
    tensors = pair("lora_unet_joint_blocks_0_x_block_attn_qkv", (30, 8))
    with pytest.raises(BadInput, match=r"30 output rows, its 3 parts .* have 24"):
        read_single_file(tensors, {}, sd3_layout)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_two_experts_in_one_file_with_their_boundary(
    make_layer: Callable[..., AdapterLayer], assert_same: AssertSame, build: Any
) -> None:
    one = ComponentLayout(
        class_name="WanTransformer3DModel", weights={"blocks.0.attn1.to_q": (6, 4)}
    )
    layout = {"transformer": one, "transformer_2": one}
    adapter = Adapter(
        components={
            "transformer": {"blocks.0.attn1.to_q": make_layer((6, 4), seed=1)},
            "transformer_2": {"blocks.0.attn1.to_q": make_layer((6, 4), seed=2, alpha=1.0)},
        },
        boundary_ratio=0.875,
    )
    tensors, metadata = build(adapter, layout)
    prefixes = json.loads(metadata[BUNDLE])["components"]
    assert len(set(prefixes.values())) == 2
    assert all(any(key.startswith(prefix) for key in tensors) for prefix in prefixes.values())
    again = read_single_file(tensors, metadata, layout)
    assert_same(adapter, again, 0)
    assert again.boundary_ratio == 0.875
    with pytest.raises(BadInput, match=r"'transformer_2'.*does not have"):
        read_single_file(tensors, metadata, {"transformer": one})


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_broken_bundle_entry_is_named(toy_layout: Layout, text: str) -> None:
    with pytest.raises(BadInput, match="drl_bundle"):
        read_single_file(pair("lora_unet_mid_to_q"), {BUNDLE: text}, toy_layout)


GOLDEN = (
    "sd3_kohya_flat",
    "sd3_kohya_no_alpha",
    "sd3_kohya_original_fused_qkv",
    "sd3_comfy_diffusion_model",
)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("case", GOLDEN)
def test_golden_files_give_the_outputs_that_were_computed(
    case: str, golden: Path, golden_sd3: torch.nn.Module, golden_layout: Layout
) -> None:
    folder = golden / "diffusers-0.42.1" / case
    facts = json.loads((folder / "case.json").read_text())
    tensors, metadata = read_tensors(folder / facts["files"][0])
    layers = read_single_file(tensors, metadata, golden_layout).components["transformer"]
    assert set(layers) == set(facts["wrapped"])
    for path, layer in layers.items():
        wanted = facts["wrapped"][path]
        assert (layer.rank, layer.scale) == (wanted["r"], pytest.approx(wanted["scale"]))
        B, A = layer.factors()
        norm = torch.linalg.matrix_norm(B @ A).item()
        assert norm == pytest.approx(wanted["delta_norm"], rel=1e-5)
        weight = golden_sd3.get_submodule(path).weight
        weight.data += (B @ A).reshape(weight.shape).float()
    io = load_file(folder / "io.safetensors")
    inputs = {key: value for key, value in io.items() if not key.startswith("y_")}
    with torch.no_grad():
        output = golden_sd3(**inputs, return_dict=False)[0]
    assert (output - io["y_active"]).abs().max() <= facts["tolerance"]["merged"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_golden_files_written_again_are_the_same_adapter(
    case: str, golden: Path, golden_layout: Layout, assert_same: AssertSame, build: Any
) -> None:
    file = next((golden / "diffusers-0.42.1" / case).glob("[kc]o*.safetensors"))
    adapter = read_single_file(*read_tensors(file), golden_layout)
    tensors, metadata = build(adapter, golden_layout)
    assert_same(adapter, read_single_file(tensors, metadata, golden_layout))
