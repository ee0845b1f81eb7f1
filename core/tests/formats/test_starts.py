"""Adapters that count from start values become plain ones of twice the rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drl.errors import BadInput
from drl.formats.adapter import AdapterLayer
from drl.formats.peft_folder import read_peft_folder
from drl.formats.starts import base_weights, needs_base, plain_layer, without_starts
from drl.lora import LoraConfig
from drl.lora.init import BASE_SCHEMES


@pytest.mark.parametrize("init", sorted(BASE_SCHEMES))
@pytest.mark.parametrize("rslora", [False, True])
def test_the_update_is_what_was_learned_since_the_start(init: str, rslora: bool) -> None:
    config = LoraConfig(rank=2, alpha=3, target_modules=("x",), init=init, use_rslora=rslora)
    W = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    A0, B0 = BASE_SCHEMES[init](W, 2, config.scale_of("x"))
    alpha = config.scale_of("x") * 2
    start = plain_layer(AdapterLayer(A=A0, B=B0, alpha=alpha), W, config, "x")
    B, A = start.factors()
    assert (B @ A).abs().max() < 1e-6  # nothing was learned yet
    learned = AdapterLayer(A=A0 + 1, B=B0 * 2, alpha=alpha)
    plain = plain_layer(learned, W, config, "x")
    assert (plain.rank, plain.scale) == (4, pytest.approx(config.scale_of("x")))
    B, A = plain.factors()
    wanted = config.scale_of("x") * (2 * B0 @ (A0 + 1) - B0 @ A0)
    torch.testing.assert_close((B @ A).float(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["init_pissa", "init_olora"])
def test_golden_adapters_merge_to_what_peft_computed(
    case: str, golden: Path, tmp_path: Path
) -> None:
    place = golden / "peft-0.21.2" / case
    facts = json.loads((place / "case.json").read_text())
    toy = load_file(golden / facts["base"] / "base.safetensors")
    folder = tmp_path / "base" / "transformer"
    folder.mkdir(parents=True)
    save_file(toy, folder / "diffusion_pytorch_model.safetensors")
    adapter = read_peft_folder(place)
    assert needs_base(adapter)
    plain = without_starts(adapter, tmp_path / "base")
    assert not needs_base(plain)
    io = load_file(place / "io.safetensors")
    for path, layer in plain.components["transformer"].items():
        B, A = layer.factors()
        merged = toy[f"{path}.weight"].double() + B @ A
        # peft keeps the base less its start values, and adds the adapter as it is
        B, A = adapter.components["transformer"][path].factors()
        wanted = io[f"residual.{path}.weight"].double() + B @ A
        torch.testing.assert_close(merged, wanted, rtol=0, atol=1e-5)


def test_a_base_without_the_tensor_is_another_base(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with base_weights(tmp_path) as weights:
        assert (list(weights), len(weights)) == (["a"], 1)
        with pytest.raises(BadInput, match="has no tensor b; it is another base model"):
            weights["b"]
