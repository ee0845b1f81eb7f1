"""The golden adapters broken by hand: each refused with its reason, or loaded with a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drl.lora import LoraError, load_peft

Run = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


@pytest.fixture
def toy_base(golden_root: Path, make_golden_base: Callable[[Path], nn.Module]) -> nn.Module:
    return make_golden_base(golden_root / "_bases" / "toy")


BROKEN_OK = {"bin_and_safetensors", "config_missing_lora_alpha"}
BROKEN_WARN = {
    "config_unknown_key": "unknown",
    "config_target_partly_matches": "match no module: .*target_modules",
    "extra_non_lora_key": "no adapter tensors",
}
# The word that the message must contain: the field, the key, the file, or what is wrong with it.
BROKEN_REFUSED = {
    "adapter_name_in_keys": "unexpected adapter keys.*lora_A.default.weight",
    "bin_with_objects": "weights_only",
    "config_alpha_null": "lora_alpha",
    "config_bad_bias": "bias",
    "config_bad_json": "invalid JSON",
    "config_fan_in_fan_out": "fan_in_fan_out",
    "config_layer_replication": "layer_replication",
    "config_missing_lora_alpha_r": "rank mismatch",
    "config_modules_to_save_missing": "modules_to_save",
    "config_no_peft_type": "peft_type is missing",
    "config_no_targets": "target_modules",
    "config_not_object": "must be an object",
    "config_peft_type_ia3": "IA3",
    "config_r_negative": r"\(r\) is -4",
    "config_r_string": r"\(r\) is '4'",
    "config_r_zero": r"\(r\) is 0",
    "config_target_matches_nothing": "no module matched",
    "config_use_dora_flag_only": "use_dora",
    "empty_file": "is empty",
    "extra_unknown_module": "unexpected keys",
    "extra_untargeted_module": "unexpected keys",
    "inf": "non-finite adapter tensor .*lora_B",
    "integer_dtype": "int8",
    "missing_lora_B": "blocks.3.attn.to_q.lora_B",
    "missing_pair": "missing keys: blocks.3.attn.to_q.lora_A.weight",
    "missing_prefix": "unexpected adapter keys",
    "nan": "non-finite adapter tensor .*lora_A",
    "no_config": "adapter_config.json does not exist",
    "no_tensors": "all lora keys are missing",
    "no_weights": "adapter_model.safetensors nor adapter_model.bin",
    "rank_differs_from_config": "rank mismatch .*rank 3, the config gives 4",
    "trailing_bytes": "too long",
    "transposed": "rank|shape",
    "truncated": "truncated",
    "truncated_header": "truncated",
    "wrong_rank_one_side": "ranks of A and B differ",
    "wrong_shape_in": r"shape mismatch .*\[4, 17\].*\[4, 16\]",
}


def test_every_broken_case_has_an_expectation(golden_root: Path) -> None:
    listed = BROKEN_OK | set(BROKEN_WARN) | set(BROKEN_REFUSED) | {"config_alpha_zero", "_good"}
    assert {path.name for path in (golden_root / "broken").iterdir() if path.is_dir()} == listed


@pytest.mark.parametrize("name", sorted(BROKEN_REFUSED))
def test_broken_adapter_is_refused_with_its_reason(
    name: str, golden_root: Path, toy_base: nn.Module
) -> None:
    directory = golden_root / "broken" / name
    before = str(toy_base)
    with pytest.raises(LoraError, match=f"(?s){BROKEN_REFUSED[name]}") as caught:
        load_peft(toy_base, directory)
    assert str(toy_base) == before
    assert str(directory) in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError) == (name in ("no_config", "no_weights"))


@pytest.mark.parametrize("name", ["_good", *sorted(BROKEN_OK), *sorted(BROKEN_WARN)])
def test_harmless_defect_loads_with_at_most_a_warning(
    name: str, golden_root: Path, toy_base: nn.Module, run_golden: Run
) -> None:
    io = load_file(golden_root / "broken" / "io.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_peft(toy_base, golden_root / "broken" / name)
    messages = [str(warning.message) for warning in caught]
    if name in BROKEN_WARN:
        assert any(re.search(BROKEN_WARN[name], message) for message in messages)
    else:
        assert messages == []
    torch.testing.assert_close(run_golden(toy_base, io), io["y_active"], rtol=0, atol=1e-4)


def test_alpha_zero_warns_and_equals_the_base(
    golden_root: Path, toy_base: nn.Module, run_golden: Run
) -> None:
    io = load_file(golden_root / "broken" / "io.safetensors")
    with pytest.warns(UserWarning, match="alpha is 0"):
        load_peft(toy_base, golden_root / "broken" / "config_alpha_zero")
    torch.testing.assert_close(run_golden(toy_base, io), io["y_base"], rtol=0, atol=1e-5)
