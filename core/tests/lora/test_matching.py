"""Which modules are adapted (lora.md 1.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import LoraConfig, LoraError, inject
from drl.lora.matching import match_targets


def names(module: nn.Module, targets: Any, exclude: Any = ()) -> list[str]:
    config = LoraConfig(rank=2, alpha=2, target_modules=targets, exclude_modules=exclude)
    return list(match_targets(module, config).layers)


def inject_targets(module: nn.Module, targets: Any, exclude: Any = ()) -> tuple[str, ...]:
    config = LoraConfig(rank=2, alpha=2, target_modules=targets, exclude_modules=exclude)
    return inject(module, config, generator=torch.Generator())


def test_suffix_matches_whole_components(toy: nn.Module) -> None:
    assert names(toy, ("to_out.0",)) == [f"blocks.{i}.attn.to_out.0" for i in range(3)]
    assert names(toy, ("proj_out",)) == ["refiner.proj_out", "proj_out"]
    assert names(toy, ("net.2", "lora_head"))[-1] == "lora_head"
    assert names(toy, ("out",)) == []


def test_block_index_does_not_match_longer_indices(make_toy: Any) -> None:
    deep = make_toy(blocks=12)
    assert names(deep, ("blocks.1.attn.to_q",)) == ["blocks.1.attn.to_q"]


def test_str_is_a_regex_over_the_whole_path(toy: nn.Module) -> None:
    assert names(toy, r"blocks\.[02]\.attn\.to_q") == ["blocks.0.attn.to_q", "blocks.2.attn.to_q"]
    assert names(toy, "to_q") == []
    assert names(toy, "proj_out") == ["proj_out"]


def test_all_linear_means_every_linear_in_any_spelling_of_case(toy: nn.Module) -> None:
    linears = [name for name, child in toy.named_modules() if isinstance(child, nn.Linear)]
    assert names(toy, "all-linear") == names(toy, "All-Linear") == linears


def test_exclude_wins_in_both_forms(toy: nn.Module) -> None:
    assert names(toy, ("to_q",), ("blocks.1.attn.to_q",)) == [
        "blocks.0.attn.to_q",
        "blocks.2.attn.to_q",
    ]
    assert names(toy, ("to_q",), r"blocks\.[12]\..*") == ["blocks.0.attn.to_q"]


def test_entry_that_matches_nothing_is_an_error_with_near_names(toy: nn.Module) -> None:
    with pytest.raises(LoraError, match=r'"to_qq".*to_q'):
        inject_targets(toy, ("to_v", "to_qq"))
    with pytest.raises(LoraError, match='"q_projection"'):
        inject_targets(toy, ("q_projection",))
    with pytest.raises(LoraError, match='"to_z"'):
        inject_targets(toy, ("to_q",), ("to_z",))


def test_match_that_cannot_be_adapted_is_an_error(toy: nn.Module) -> None:
    with pytest.raises(LoraError, match=r"blocks.0.attn.to_out \(ModuleList\)"):
        inject_targets(toy, ("to_out",))


def test_everything_excluded_is_an_error(toy: nn.Module) -> None:
    with pytest.raises(LoraError, match="no module matched"):
        inject_targets(toy, ("to_q",), ("to_q",))


def test_a_bare_linear_has_no_module_inside() -> None:
    with pytest.raises(LoraError, match="has no"):
        inject_targets(nn.Linear(2, 2), "all-linear")


def test_refused_injection_leaves_the_model_alone(toy: nn.Module) -> None:
    before = str(toy)
    with pytest.raises(LoraError):
        inject_targets(toy, ("to_q", "nothing_like_it"))
    assert str(toy) == before
    assert all(parameter.requires_grad for parameter in toy.parameters())


def test_a_linear_used_in_two_places_is_refused(toy: nn.Module) -> None:
    toy.refiner.proj_out = toy.proj_out
    with pytest.raises(LoraError, match="2 places"):
        inject_targets(toy, ("proj_out",))


def test_multihead_attention_projection_is_refused() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with pytest.raises(LoraError, match="MultiheadAttention"):
        inject_targets(model, ("out_proj",))
