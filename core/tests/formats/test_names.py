"""Names of modules in single files: flattening, original names, prefixes. Never by splitting strings."""

from __future__ import annotations

import pytest

from drl.errors import BadInput
from drl.formats.layout import ComponentLayout
from drl.formats.names import (
    ModuleNames,
    Place,
    comfy_prefix,
    component_of_kohya,
    denoiser,
    flat,
    kohya_prefix,
    original_place,
)

SD3, WAN = "SD3Transformer2DModel", "WanTransformer3DModel"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("transformer_blocks.3.attn.to_q", Place("joint_blocks.3.x_block.attn.qkv", 0, 3)),
        ("transformer_blocks.3.attn.to_v", Place("joint_blocks.3.x_block.attn.qkv", 2, 3)),
        (
            "transformer_blocks.3.attn.add_k_proj",
            Place("joint_blocks.3.context_block.attn.qkv", 1, 3),
        ),
        ("transformer_blocks.3.attn2.to_k", Place("joint_blocks.3.x_block.attn2.qkv", 1, 3)),
        ("transformer_blocks.12.attn.to_out.0", Place("joint_blocks.12.x_block.attn.proj")),
        ("transformer_blocks.1.attn.to_add_out", Place("joint_blocks.1.context_block.attn.proj")),
        ("transformer_blocks.1.attn2.to_out.0", Place("joint_blocks.1.x_block.attn2.proj")),
        ("transformer_blocks.1.ff.net.0.proj", Place("joint_blocks.1.x_block.mlp.fc1")),
        ("transformer_blocks.1.ff.net.2", Place("joint_blocks.1.x_block.mlp.fc2")),
        ("transformer_blocks.1.ff_context.net.2", Place("joint_blocks.1.context_block.mlp.fc2")),
        ("time_text_embed.timestep_embedder.linear_2", Place("t_embedder.mlp.2")),
        ("pos_embed.proj", Place("x_embedder.proj")),
        ("proj_out", Place("final_layer.linear")),
    ],
)
def test_original_names_of_stable_diffusion_3(path: str, place: Place) -> None:
    assert original_place(SD3, path) == place


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("blocks.0.attn1.to_q", "blocks.0.self_attn.q"),
        ("blocks.0.attn1.to_out.0", "blocks.0.self_attn.o"),
        ("blocks.29.attn2.to_v", "blocks.29.cross_attn.v"),
        ("blocks.29.attn2.to_out.0", "blocks.29.cross_attn.o"),
        ("blocks.0.attn2.add_k_proj", "blocks.0.cross_attn.k_img"),
        ("blocks.0.attn2.add_v_proj", "blocks.0.cross_attn.v_img"),
        ("blocks.0.ffn.net.0.proj", "blocks.0.ffn.0"),
        ("blocks.0.ffn.net.2", "blocks.0.ffn.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("proj_out", "head.head"),
    ],
)
def test_original_names_of_wan(path: str, name: str) -> None:
    assert original_place(WAN, path) == Place(name)


@pytest.mark.parametrize("path", ["norm_out.linear", "transformer_blocks.0.norm1_context.linear"])
def test_modulation_layers_whose_halves_changed_places_have_no_original_name(path: str) -> None:
    assert original_place(SD3, path) is None


def test_other_models_have_no_original_names() -> None:
    assert original_place("QwenImageTransformer2DModel", "transformer_blocks.0.attn.to_q") is None


def names(*paths: str, class_name: str = "Toy") -> ModuleNames:
    weights = dict.fromkeys(paths, (4, 4))
    return ModuleNames("transformer", ComponentLayout(class_name=class_name, weights=weights))


def test_a_flattened_name_is_looked_up_though_components_have_underscores() -> None:
    known = names("blocks.0.attn.to_add_out", "blocks.0.attn.to_out.0", "img_mlp.net.2")
    for path in known.layout.weights:
        assert known.find(flat(path)) == (path,)
        assert known.find(path) == (path,)
    assert known.find("blocks_0_attn_to_out") is None


def test_a_name_that_could_mean_two_modules_is_an_error() -> None:
    known = names("block.to_q", "block_to.q", "block.to_k")
    with pytest.raises(BadInput, match=r'"block_to_q" is ambiguous .*block.to_q or block_to.q'):
        known.find("block_to_q")
    assert known.find("block.to_q") == ("block.to_q",)
    assert known.find("block_to_k") == ("block.to_k",)


def test_a_fused_name_means_its_parts_in_row_order() -> None:
    attention = [f"transformer_blocks.0.attn.to_{letter}" for letter in "vkq"]
    known = names(*attention, class_name=SD3)
    assert known.find("joint_blocks_0_x_block_attn_qkv") == tuple(reversed(attention))
    assert known.find("joint_blocks.0.x_block.attn.qkv") == tuple(reversed(attention))
    assert known.find("joint_blocks_1_x_block_attn_qkv") is None


def test_a_fused_name_needs_all_of_its_parts_in_the_model() -> None:
    known = names("transformer_blocks.0.attn.to_q", class_name=SD3)
    assert known.find("joint_blocks_0_x_block_attn_qkv") is None


@pytest.mark.parametrize(
    ("component", "kohya"),
    [
        ("transformer", "lora_unet_"),
        ("unet", "lora_unet_"),
        ("transformer_2", "lora_unet2_"),
        ("text_encoder", "lora_te1_"),
        ("text_encoder_2", "lora_te2_"),
        ("text_encoder_3", "lora_te3_"),
    ],
)
def test_prefixes_of_components_and_back(component: str, kohya: str) -> None:
    layout = {component.removesuffix("_2"): ComponentLayout(class_name="Toy", weights={})}
    assert kohya_prefix(component) == kohya
    assert component_of_kohya(kohya, layout) == component


def test_comfy_prefixes_and_components_without_a_place() -> None:
    assert comfy_prefix("transformer") == "diffusion_model."
    assert comfy_prefix("transformer_2") == "diffusion_model_2."
    with pytest.raises(BadInput, match="text_encoder"):
        comfy_prefix("text_encoder")
    with pytest.raises(BadInput, match="vae"):
        kohya_prefix("vae")


def test_one_text_encoder_may_have_no_number() -> None:
    assert component_of_kohya("lora_te_", {}) == "text_encoder"


def test_the_denoiser_is_the_transformer_else_the_unet() -> None:
    assert denoiser(["vae", "unet"]) == "unet"
    assert denoiser(["unet", "transformer"]) == "transformer"
    assert denoiser([]) == "transformer"
