"""What drl writes is read by stock PEFT and diffusers, at the right strength."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import (
    LoraConfig,
    adapter_state,
    adapters,
    inject,
    load_peft,
    merged_state,
    read_peft,
    save_peft,
)

CONFIGS = {
    "plain": {"rank": 4, "alpha": 8, "target_modules": ("attn.to_q", "attn.to_out.0", "net.2")},
    "fractional": {"rank": 8, "alpha": 5.0, "target_modules": ("to_v", "net.0.proj")},
    "patterns_rslora": {
        "rank": 4,
        "alpha": 6,
        "use_rslora": True,
        "target_modules": ("to_q", "to_out.0", "proj_out"),
        "rank_pattern": {"[a-z_]*blocks.1.attn.to_q": 2, "^proj_out": 3},
        "alpha_pattern": {"[a-z_]*blocks.1.attn.to_q": 5},
    },
    "overlap": {
        "rank": 4,
        "alpha": 8,
        "target_modules": ("to_q", "to_k"),
        "rank_pattern": {"to_q": 6, "[a-z_]*blocks.1.attn.to_q": 2},
        "alpha_pattern": {"to_q": 3, "[a-z_]*blocks.1.attn.to_q": 5},
    },
    "all_linear": {"rank": 2, "alpha": 3, "target_modules": "all-linear"},
    "regex_exclude": {
        "rank": 2,
        "alpha": 1,
        "target_modules": r".*blocks\.\d\.attn\.to_[qkv]",
        "exclude_modules": r".*blocks\.1\..*",
    },
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> LoraConfig:
    return LoraConfig(**CONFIGS[request.param])


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=2e-5)


def scales_in(model: nn.Module) -> dict[str, float]:
    """Scale of every PEFT layer, by plain module path."""
    from peft.tuners.lora import LoraLayer

    return {
        name.removeprefix("base_model.model."): next(iter(layer.scaling.values()))
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


def our_scales(model: nn.Module) -> dict[str, float]:
    return {fqn: tensors.scale for fqn, tensors in adapters(model).items()}


@torch.no_grad()
def test_stock_peft_loads_it(
    config: LoraConfig,
    make_toy: Callable[..., nn.Module],
    toy_inputs: dict[str, torch.Tensor],
    perturb: Callable[[nn.Module], None],
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    model = make_toy()
    inject(model, config, generator=torch.Generator().manual_seed(0))
    perturb(model)
    save_peft(model, tmp_path / "a", config, base_model="toy")
    stock = peft.PeftModel.from_pretrained(make_toy(), tmp_path / "a")
    assert scales_in(stock) == pytest.approx(our_scales(model))
    assert close(stock(**toy_inputs), model(**toy_inputs))
    assert not close(make_toy()(**toy_inputs), model(**toy_inputs))
    merged = make_toy()
    merged.load_state_dict(dict(merged_state(model)), strict=True)
    assert close(stock.merge_and_unload()(**toy_inputs), merged(**toy_inputs))


@torch.no_grad()
def test_stock_peft_resaves_the_same_tensors(
    config: LoraConfig,
    make_toy: Callable[..., nn.Module],
    perturb: Callable[[nn.Module], None],
    toy_inputs: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    model = make_toy()
    inject(model, config, generator=torch.Generator().manual_seed(0))
    perturb(model)
    save_peft(model, tmp_path / "a", config, base_model="toy")
    peft.PeftModel.from_pretrained(make_toy(), tmp_path / "a").save_pretrained(tmp_path / "b")
    _, state = read_peft(tmp_path / "b")
    assert set(state) == set(adapter_state(model))
    for key, tensor in adapter_state(model).items():
        assert torch.equal(state[key], tensor)
    again = make_toy()
    load_peft(again, tmp_path / "b")
    assert torch.equal(again(**toy_inputs), model(**toy_inputs))


def test_both_default_initialisations_have_pefts_bounds(make_toy: Callable[..., nn.Module]) -> None:
    peft = pytest.importorskip("peft")
    for init, stock_init in (("kaiming-uniform", True), ("gaussian", "gaussian")):
        ours, theirs = make_toy(dim=64), make_toy(dim=64)
        config = LoraConfig(rank=32, alpha=8, target_modules=("proj_out",), init=init)
        inject(ours, config, generator=torch.Generator().manual_seed(0))
        fields = {"r": 32, "target_modules": ["proj_out"], "init_lora_weights": stock_init}
        stock = peft.get_peft_model(theirs, peft.LoraConfig(**fields))
        A = stock.base_model.model.proj_out.lora_A["default"].weight
        assert adapters(ours)["proj_out"].A.std().item() == pytest.approx(A.std().item(), rel=0.1)


SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "out_channels": 4,
    "pos_embed_max_size": 8,
}


def make_transformer() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return diffusers.SD3Transformer2DModel(**SD3).eval()


def make_pipeline() -> Any:
    diffusers = pytest.importorskip("diffusers")
    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    empty = dict.fromkeys((*names, "text_encoder_3", "tokenizer_3"))
    return diffusers.StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        **empty,
    )


def velocity(transformer: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        output: torch.Tensor = transformer(
            hidden_states=torch.randn(2, 4, 8, 8, generator=generator),
            encoder_hidden_states=torch.randn(2, 5, 12, generator=generator),
            pooled_projections=torch.randn(2, 10, generator=generator),
            timestep=torch.tensor([300.0, 700.0]),
            return_dict=False,
        )[0]
    return output


@pytest.fixture
def saved(
    config: LoraConfig, perturb: Callable[[nn.Module], None], tmp_path: Path
) -> tuple[nn.Module, Path]:
    model = make_transformer()
    inject(model, config, generator=torch.Generator().manual_seed(0))
    perturb(model)
    save_peft(model, tmp_path / "adapter", config, base_model="tiny-sd3")
    return model, tmp_path / "adapter"


def assert_same_model(loaded: nn.Module, ours: nn.Module) -> None:
    assert scales_in(loaded) == pytest.approx(our_scales(ours))
    assert close(velocity(loaded), velocity(ours))
    assert not close(velocity(make_transformer()), velocity(ours))


def test_diffusers_pipeline_loads_the_directory_with_default_arguments(
    saved: tuple[nn.Module, Path],
) -> None:
    ours, directory = saved
    pipeline = make_pipeline()
    pipeline.load_lora_weights(str(directory))
    assert_same_model(pipeline.transformer, ours)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_name": "adapter_model.safetensors", "prefix": "base_model.model"},
        {"weight_name": "pytorch_lora_weights.safetensors"},
    ],
)
def test_diffusers_model_loads_either_file(
    saved: tuple[nn.Module, Path], arguments: dict[str, str]
) -> None:
    ours, directory = saved
    transformer = make_transformer()
    transformer.load_lora_adapter(str(directory), **arguments)
    assert_same_model(transformer, ours)


def test_another_component_is_loaded_with_its_own_prefix(
    perturb: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    config, ours = LoraConfig(**CONFIGS["plain"]), make_transformer()
    inject(ours, config, generator=torch.Generator().manual_seed(0))
    perturb(ours)
    save_peft(ours, tmp_path / "a", config, base_model=None, component="transformer_2")
    other = make_transformer()
    other.load_lora_adapter(
        str(tmp_path / "a"),
        weight_name="pytorch_lora_weights.safetensors",
        prefix="transformer_2",
    )
    assert_same_model(other, ours)


@torch.no_grad()
def test_an_adapter_trained_with_peft_loads_here(
    make_toy: Callable[..., nn.Module], toy_inputs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    fields = {"r": 4, "lora_alpha": 10, "target_modules": ["to_q", "net.2"], "use_rslora": True}
    stock = peft.get_peft_model(make_toy(), peft.LoraConfig(**fields)).eval()
    for name, parameter in stock.named_parameters():
        if "lora_B" in name:
            parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    stock.save_pretrained(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["peft_version"]
    ours = make_toy()
    load_peft(ours, tmp_path / "a")
    assert our_scales(ours) == pytest.approx(scales_in(stock))
    assert close(ours(**toy_inputs), stock(**toy_inputs))
