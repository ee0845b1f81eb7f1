"""Hundreds of damaged adapter directories: each one clear error, or a config that was read."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    adapter_state,
    inject,
    load_peft,
    read_peft,
    remove_adapter,
    save_peft,
)

CONFIG = LoraConfig(rank=4, alpha=6, target_modules=("proj_out", "to_q"))
FIELDS = (
    "peft_type", "r", "lora_alpha", "lora_dropout",
    "target_modules", "exclude_modules", "init_lora_weights", "bias",
    "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "lora_bias", "fan_in_fan_out", "layer_replication", "layers_to_transform",
    "layers_pattern", "modules_to_save", "target_parameters", "megatron_config",
    "target_modules", "bias", "init_lora_weights", "modules_to_save",
    "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora",
    "arrow_config",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 4, 2.5, -0.5, 1e308, 10**400, float("nan"), float("inf"), "",
    "to_q", "(", "a{99999999999}", "\u0000", "LORA", "gaussian", "pissa", [], [None], [[]], [""],
    ["to_q"], ["to_q", "to_q"], [1, 2], ["("], {}, {"to_q": 2}, {"to_q": -2}, {"to_q": "x"},
    {"(": 2}, {"": 3}, {"to_q": None}, {"to_q": {"deep": 1}}, [0, 1], "x" * 5000,
    "all", "lora_only", "olora", "orthogonal", "pissa_niter_4", "blocks", ["lora_head"], ["blocks"],
    2, [-1], ["proj_out", "to_q", "conv_in"], ["to_q", "to_z"],
)  # fmt: skip


@pytest.fixture
def good(
    toy: nn.Module, perturb: Callable[[nn.Module], None], tmp_path: Path
) -> tuple[Path, dict[str, Any]]:
    inject(toy, CONFIG, generator=torch.Generator().manual_seed(0))
    perturb(toy)
    save_peft(toy, tmp_path / "a", CONFIG, base_model=None)
    return tmp_path / "a", json.loads((tmp_path / "a" / "adapter_config.json").read_text())


def outcome(read: Callable[[], object]) -> str:
    """Run ``read``; anything but success or a clear LoraError lets the test fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except LoraError as error:
            message = str(error)
        else:
            return "read"
    assert 20 < len(message) < 2000
    return "refused"


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_mutated_config_is_refused_with_one_clear_error_or_loads(
    good: tuple[Path, dict[str, Any]],
    make_toy: Callable[..., nn.Module],
    toy_inputs: dict[str, torch.Tensor],
    count: int,
) -> None:
    directory, fields = good
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    stored = weights.read_bytes()
    rng = random.Random(count)
    model = make_toy()
    before, base = str(model), {key: t.clone() for key, t in model.state_dict().items()}
    outcomes = []
    for _ in range(count):
        broken = copy.deepcopy(fields)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            broken[rng.choice(FIELDS)] = rng.choice(VALUES)
        config.write_text(json.dumps(broken))
        read = outcome(lambda: read_peft(directory))
        outcomes.append(outcome(lambda: load_peft(model, directory)))
        if outcomes[-1] == "refused":
            assert str(model) == before
        else:
            # what only its model can read is pissa or olora; everything else reads alone too
            assert read == "read" or broken["init_lora_weights"] in ("pissa", "olora")
            with torch.no_grad():
                model(**toy_inputs)
            remove_adapter(model, "default")
            assert str(model) == before
    assert all(torch.equal(t, base[key]) for key, t in model.state_dict().items())
    assert weights.read_bytes() == stored
    assert json.loads(config.read_text()).keys() >= fields.keys()
    assert outcomes.count("refused") > count // 2
    assert outcomes.count("read") > count // 40


def test_a_config_that_reads_either_loads_or_is_refused_unchanged(
    good: tuple[Path, dict[str, Any]], make_toy: Callable[..., nn.Module]
) -> None:
    directory, fields = good
    rng = random.Random(1)
    for _ in range(60):
        field = rng.choice(["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
        broken = {**fields, field: rng.choice(VALUES)}
        (directory / "adapter_config.json").write_text(json.dumps(broken))
        model = make_toy()
        before = str(model)
        if outcome(lambda model=model: load_peft(model, directory)) == "refused":
            assert str(model) == before


def test_configs_cut_or_garbled_at_any_byte_give_one_clear_error(
    good: tuple[Path, dict[str, Any]],
) -> None:
    directory, fields = good
    path, rng = directory / "adapter_config.json", random.Random(2)
    whole = json.dumps(fields).encode()
    for _ in range(150):
        at = rng.randrange(len(whole))
        cut = whole[:at]
        garbled = whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :]
        for content in (cut, garbled):
            path.write_bytes(content)
            outcome(lambda: read_peft(directory))
    for content in (b"", b"[" * 200_000, b'"LORA"', b"null", b"\xff\xfe", b'{"r": ' + b"9" * 9000):
        path.write_bytes(content)
        assert outcome(lambda: read_peft(directory)) == "refused"


def test_weight_files_damaged_at_any_byte_give_one_clear_error(
    good: tuple[Path, dict[str, Any]],
) -> None:
    directory, _ = good
    path, rng = directory / "adapter_model.safetensors", random.Random(3)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(150):
        at = rng.randrange(header)
        path.write_bytes(whole[: rng.randrange(len(whole))])
        assert outcome(lambda: read_peft(directory)) == "refused"
        path.write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
        outcome(lambda: read_peft(directory))


def test_damaged_pickles_give_one_clear_error(good: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = good
    safe, path = directory / "adapter_model.safetensors", directory / "adapter_model.bin"
    torch.save(load_file(safe), path)
    safe.unlink()
    whole, rng = path.read_bytes(), random.Random(4)
    for _ in range(60):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at])
        assert outcome(lambda: read_peft(directory)) == "refused"
        path.write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
        outcome(lambda: read_peft(directory))


def damage(tensors: dict[str, torch.Tensor], rng: random.Random) -> dict[str, torch.Tensor]:
    key = rng.choice(sorted(tensors))
    tensor = tensors[key]
    changed = tensor.clone()
    changed[0, 0] = rng.choice([float("nan"), float("inf"), -float("inf")])
    replacement = rng.choice(
        [
            None,
            changed,
            tensor.to(torch.int16),
            tensor[:, :-1].contiguous(),
            tensor[:-1].contiguous(),
            tensor[None],
            tensor.flatten(),
            torch.empty(0, 4),
        ]
    )
    rest = {name: value for name, value in tensors.items() if name != key}
    if replacement is not None:
        rest[key] = replacement
    elif rng.random() < 0.5:
        rest[key.replace(".lora_", rng.choice([".lora_magnitude.lora_", ".", ".lora_C."]))] = tensor
    return rest


def test_damaged_tensors_are_all_refused_and_change_nothing(
    good: tuple[Path, dict[str, Any]], make_toy: Callable[..., nn.Module]
) -> None:
    directory, _ = good
    path, rng = directory / "adapter_model.safetensors", random.Random(5)
    tensors = load_file(path)
    model = make_toy()
    inject(model, CONFIG, generator=torch.Generator().manual_seed(1))
    before = {key: tensor.clone() for key, tensor in adapter_state(model).items()}
    for _ in range(150):
        save_file(damage(tensors, rng), path)
        assert outcome(lambda: load_peft(model, directory)) == "refused"
    assert all(torch.equal(t, before[key]) for key, t in adapter_state(model).items())
