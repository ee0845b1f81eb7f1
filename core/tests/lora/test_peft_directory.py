"""Writing and reading adapter directories: completeness, atomic replacement, strictness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from drl.lora import (
    AdapterNotFound,
    LoraConfig,
    LoraError,
    adapter_state,
    adapters,
    inject,
    load_peft,
    read_peft,
    save_peft,
)

FILES = ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 6, "target_modules": ("proj_out", "to_q"), **changes})


@pytest.fixture
def adapted(toy: nn.Module, perturb: Callable[[nn.Module], None]) -> nn.Module:
    inject(toy, config(), generator=torch.Generator().manual_seed(0))
    perturb(toy)
    return toy


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_directory_holds_both_formats_and_the_strength(adapted: nn.Module, tmp_path: Path) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model="org/model", component="transformer_2")
    assert names_in(tmp_path / "a") == FILES
    text = (tmp_path / "a" / FILES[0]).read_text()
    fields = json.loads(text)
    assert text == json.dumps(fields, indent=2, sort_keys=True) + "\n"
    assert (fields["r"], fields["lora_alpha"], fields["peft_type"]) == (4, 6, "LORA")
    assert fields["base_model_name_or_path"] == "org/model"
    assert fields["target_modules"] == ["proj_out", "to_q"]
    key = "blocks.0.attn.to_q.lora_A.weight"
    for name, prefix in ((FILES[1], "base_model.model."), (FILES[2], "transformer_2.")):
        tensors, metadata = load_file(tmp_path / "a" / name), header(tmp_path / "a" / name)
        assert torch.equal(tensors[prefix + key], adapter_state(adapted)[key])
        assert all(tensor_name.startswith(prefix) for tensor_name in tensors)
        described = json.loads(metadata["lora_adapter_metadata"])
        assert metadata["format"] == "pt"
        assert described == {prefix + field: value for field, value in fields.items()}


def test_round_trip_injects_and_gives_equal_outputs(
    adapted: nn.Module,
    make_toy: Callable[..., nn.Module],
    toy_inputs: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model="m")
    fresh = make_toy()
    read = load_peft(fresh, tmp_path / "a")
    assert read == config(init="gaussian")
    assert torch.equal(fresh(**toy_inputs), adapted(**toy_inputs))
    assert {n for n, p in fresh.named_parameters() if p.requires_grad} == {
        n for n, p in adapted.named_parameters() if p.requires_grad
    }


def test_loading_into_an_injected_module(
    adapted: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model="m")
    other = make_toy()
    inject(other, config(), generator=torch.Generator().manual_seed(4))
    load_peft(other, tmp_path / "a")
    for key, tensor in adapter_state(other).items():
        assert torch.equal(tensor, adapter_state(adapted)[key])


@pytest.mark.parametrize("changes", [{"alpha": 12}, {"use_rslora": True}, {"rank": 2, "alpha": 3}])
def test_loading_at_another_strength_or_rank_is_refused(
    adapted: nn.Module,
    make_toy: Callable[..., nn.Module],
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model="m")
    other = make_toy()
    inject(other, config(**changes), generator=torch.Generator())
    before = {key: tensor.clone() for key, tensor in adapter_state(other).items()}
    with pytest.raises(LoraError, match=r"strength|shape mismatch"):
        load_peft(other, tmp_path / "a")
    assert all(torch.equal(t, before[key]) for key, t in adapter_state(other).items())


def test_loading_into_a_module_with_other_targets_is_refused(
    adapted: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model="m")
    other = make_toy()
    inject(other, config(target_modules=("to_q", "to_k")), generator=torch.Generator())
    with pytest.raises(LoraError, match=r"missing keys.*to_k.*unexpected keys.*proj_out"):
        load_peft(other, tmp_path / "a")


def test_loading_into_a_meta_module_is_refused(
    adapted: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model="m")
    with pytest.raises(LoraError, match="no storage"):
        load_peft(make_toy().to("meta"), tmp_path / "a")


def test_all_linear_is_written_as_resolved_paths(
    toy: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    everything = config(target_modules="all-linear", exclude_modules=("to_q",))
    names = inject(toy, everything, generator=torch.Generator())
    save_peft(toy, tmp_path / "a", everything, base_model="m")
    fields = json.loads((tmp_path / "a" / FILES[0]).read_text())
    assert fields["target_modules"] == sorted(names)
    assert list(adapters(toy)) == list(names)
    load_peft(make_toy(), tmp_path / "a")


def test_regex_targets_and_excludes_round_trip(toy: nn.Module, tmp_path: Path) -> None:
    regex = config(target_modules=r"blocks\.\d\.attn\.to_[qk]", exclude_modules=r".*\.1\..*")
    inject(toy, regex, generator=torch.Generator())
    save_peft(toy, tmp_path / "a", regex, base_model=None)
    assert read_peft(tmp_path / "a")[0] == regex


def test_patterns_and_rslora_round_trip(toy: nn.Module, tmp_path: Path) -> None:
    patterned = config(
        use_rslora=True, dropout=0.25, rank_pattern={"^proj_out": 2}, alpha_pattern={"to_q": 0.5}
    )
    inject(toy, patterned, generator=torch.Generator())
    save_peft(toy, tmp_path / "a", patterned, base_model=None)
    assert read_peft(tmp_path / "a")[0] == patterned


def test_overlapping_patterns_are_rewritten_so_that_sorting_keeps_their_meaning(
    toy: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    overlapping = config(
        rank_pattern={"to_q": 6, "blocks.1.attn.to_q": 2},
        alpha_pattern={"to_q": 3, "blocks.1.attn.to_q": 5},
    )
    with pytest.warns(UserWarning, match="decides nothing"):
        inject(toy, overlapping, generator=torch.Generator())
    save_peft(toy, tmp_path / "a", overlapping, base_model=None)
    fields = json.loads((tmp_path / "a" / FILES[0]).read_text())
    assert fields["rank_pattern"] == {rf"^blocks\.{i}\.attn\.to_q": 6 for i in range(3)}
    again = make_toy()
    load_peft(again, tmp_path / "a")
    for fqn, tensors in adapters(again).items():
        assert (tensors.rank, tensors.scale) == (adapters(toy)[fqn].rank, adapters(toy)[fqn].scale)


def test_state_dtype_is_kept_on_disk(adapted: nn.Module, tmp_path: Path) -> None:
    half = {key: tensor.bfloat16() for key, tensor in adapter_state(adapted).items()}
    save_peft(half, tmp_path / "a", config(), base_model=None)
    assert {t.dtype for t in load_file(tmp_path / "a" / FILES[1]).values()} == {torch.bfloat16}


def test_strided_and_shared_tensors_are_written(adapted: nn.Module, tmp_path: Path) -> None:
    state = adapter_state(adapted)
    key = "proj_out.lora_A.weight"
    state[key] = state[key].T.contiguous().T
    state["refiner.proj_out.lora_A.weight"] = state[key]
    save_peft(state, tmp_path / "a", config(), base_model=None)
    assert torch.equal(read_peft(tmp_path / "a")[1][key], state[key])


@pytest.mark.parametrize(
    ("breakage", "word"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "proj_out.lora_B.weight"}, "missing"),
        (lambda s: {**s, "proj_out.weight": torch.ones(2)}, "unexpected adapter keys"),
        (lambda s: {}, "no adapter tensor"),
        (lambda s: {**s, "proj_out.lora_A.weight": torch.full((4, 8), torch.nan)}, "non-finite"),
        (lambda s: {**s, "proj_out.lora_A.weight": torch.ones(3, 8)}, "ranks of A and B differ"),
    ],
)
def test_unsound_state_is_not_written(
    adapted: nn.Module, tmp_path: Path, breakage: Callable[[Any], Any], word: str
) -> None:
    with pytest.raises(LoraError, match=word):
        save_peft(breakage(adapter_state(adapted)), tmp_path / "a", config(), base_model=None)
    assert names_in(tmp_path) == []


def test_config_that_does_not_describe_the_adapter_is_refused(
    adapted: nn.Module, tmp_path: Path
) -> None:
    for wrong, word in (
        (config(alpha=5), "strength"),
        (config(target_modules=("to_q",)), "do not select refiner.proj_out, proj_out"),
        (config(exclude_modules=("refiner.proj_out",)), "do not select refiner.proj_out"),
    ):
        with pytest.raises(LoraError, match=word):
            save_peft(adapted, tmp_path / "a", wrong, base_model=None)
    with pytest.raises(LoraError, match="component"):
        save_peft(adapted, tmp_path / "a", config(), base_model=None, component="a.b")
    with pytest.raises(LoraError, match="no adapters"):
        save_peft(nn.Linear(2, 2), tmp_path / "a", config(), base_model=None)
    assert names_in(tmp_path) == []


def test_missing_directory_and_files_are_not_found(tmp_path: Path) -> None:
    for directory in (tmp_path / "none", tmp_path):
        with pytest.raises(AdapterNotFound, match=r"adapter_config.json"):
            read_peft(directory)
    assert issubclass(AdapterNotFound, FileNotFoundError)


def test_a_pickle_with_nested_tensors_is_refused(adapted: nn.Module, tmp_path: Path) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model=None)
    (tmp_path / "a" / FILES[1]).unlink()
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(LoraError, match="dict of tensors"):
        read_peft(tmp_path / "a")


def test_a_pickle_of_plain_tensors_loads(
    adapted: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model=None)
    tensors = load_file(tmp_path / "a" / FILES[1])
    (tmp_path / "a" / FILES[1]).unlink()
    torch.save(tensors, tmp_path / "a" / "adapter_model.bin")
    fresh = make_toy()
    load_peft(fresh, tmp_path / "a")
    for key, tensor in adapter_state(fresh).items():
        assert torch.equal(tensor, adapter_state(adapted)[key])


def test_layer_index_zero_is_not_taken_for_off(
    adapted: nn.Module, make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    save_peft(adapted, tmp_path / "a", config(), base_model=None)
    path = tmp_path / "a" / FILES[0]
    path.write_text(json.dumps({**json.loads(path.read_text()), "layers_to_transform": 0}))
    assert read_peft(tmp_path / "a")[0].layers_to_transform == (0,)
    with pytest.raises(LoraError, match="no module matched"):  # the list is at the root
        load_peft(make_toy(), tmp_path / "a")


def test_short_suffixes_that_also_hit_containers_are_confirmed_by_the_keys(
    make_toy: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """PEFT shortens all-linear to names such as ``2``, which also hits the container blocks.2."""
    model = make_toy()
    inject(model, config(target_modules=("net.2",)), generator=torch.Generator())
    save_peft(model, tmp_path / "a", config(target_modules=("net.2",)), base_model=None)
    path = tmp_path / "a" / FILES[0]
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": ["2"]}))
    load_peft(make_toy(), tmp_path / "a")
