"""Adapter directories written by PEFT, diffusers and VeOmni: read, run, merge, write back.

The directory comes from ``DRL_GOLDEN`` (default ``../shared/golden`` beside the repository); its
``adapters/README.md`` says what each case must do.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drl.lora import (
    LoraConfig,
    LoraError,
    active_adapter,
    adapter_names,
    adapter_off,
    adapter_state,
    adapters,
    inject,
    load_peft,
    lora_layers,
    merged_state,
    read_peft,
    save_peft,
)

Run = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]

DEFAULT_GOLDEN = Path(__file__).resolve().parents[3].parent / "shared" / "golden"
ROOT = Path(os.environ.get("DRL_GOLDEN", DEFAULT_GOLDEN)) / "adapters"
pytestmark = pytest.mark.skipif(
    not ROOT.is_dir(), reason=f"no golden adapters at {ROOT}; set DRL_GOLDEN"
)

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")

# What a later issue adds. Until then each must be refused; the value is what the error must name.
LATER = {
    r"peft-.*/(experts_.*|router_param|perexpert_names.*|all_linear_moe)": "target_parameters",
    r"veomni-.*/moe_.*": "target_parameters",
    r"derived/(old|new)_.*": "target_parameters",
    r"derived/perexpert_.*": "unexpected keys|no module matched",
}
# Refused for good: variants, and files that contradict themselves.
REFUSED = {
    r"peft-.*/dora": "use_dora",
    r"peft-.*/lora_bias": "lora_bias",
    r"peft-.*/init_pissa_niter_4": "init_lora_weights.*random decomposition",
    r"peft-.*/patterns_overlap": "rank mismatch",
    r"veomni-.*/dense_unanchored_pattern": "rank mismatch",
    r"peft-.*/two_adapters_module_name:default": "missing keys",
}
# No PEFT directory: single files and names of adapters, which this package does not read or have.
NOT_A_DIRECTORY = (
    r"diffusers-.*/sd3_(comfy|kohya|old)_.*|peft-.*/name_my_dot_adapter|"
    r"peft-.*/perexpert_gate_only"
)
# The tool could not create these; injection must refuse them too.
NEVER_CREATED = {
    r"peft-.*/(regex_not_suffix|suffix_partial_component|layers_to_transform)": "no module matched",
}
# Started from the base weights: written back they are plain adapters of twice the rank.
CONVERTED = r"peft-.*/init_(pissa|olora)"
# drl switches trained biases off with their adapter, and never changes the base.
OFF_IS_THE_BASE = rf"{CONVERTED}|peft-.*/bias_.*"


def all_cases() -> list[str]:
    found = [str(path.parent.relative_to(ROOT)) for path in sorted(ROOT.glob("*/*/case.json"))]
    return [case for case in found if not case.startswith("broken/")]


def case_info(case: str) -> dict[str, Any]:
    return json.loads((ROOT / case / "case.json").read_text())


def adapter_folders() -> list[str]:
    """Every PEFT directory, as ``case:folder inside it`` (``default`` for the case's own)."""
    folders = []
    for case in all_cases():
        files = case_info(case).get("files") or []
        for file in files:
            if file.endswith("adapter_config.json"):
                folders.append(f"{case}:{Path(file).parent if '/' in file else 'default'}")
    return folders


def case_of(folder: str) -> str:
    return folder.partition(":")[0]


def expected_error(folder: str) -> str | None:
    case = case_of(folder)
    for pattern, word in (REFUSED | LATER).items():
        if re.fullmatch(pattern, folder if ":" in pattern else case):
            return word
    return None


def converted(folder: str) -> bool:
    return re.fullmatch(CONVERTED, case_of(folder)) is not None


def path_of(folder: str) -> Path:
    case, inside = folder.split(":")
    return ROOT / case if inside == "default" else ROOT / case / inside


READABLE = [folder for folder in adapter_folders() if expected_error(folder) is None]
REFUSED_FOLDERS = [folder for folder in adapter_folders() if expected_error(folder) is not None]


@pytest.fixture
def golden_model(make_golden_base: Callable[[Path], nn.Module]) -> Callable[[str], nn.Module]:
    def make(case: str) -> nn.Module:
        base = ROOT / case_info(case)["base"]
        if base.name.startswith("qwen3moe"):
            return moe_base(base)
        return make_golden_base(base)

    return make


def moe_base(folder: Path) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = json.loads((folder / "config.json").read_text())
    fields = {key: value for key, value in config.items() if not key.startswith("_")}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))


def expected_output(io: dict[str, torch.Tensor], folder: str) -> torch.Tensor:
    inside = folder.split(":")[1]
    return io["y_active"] if "y_active" in io else io[f"y_active.{inside}"]


def expected_layers(folder: str) -> dict[str, Any]:
    case, inside = folder.split(":")
    info = case_info(case)
    # Cases with several adapters have one config, and one table of layers, for each.
    return info["wrapped"][inside] if inside in info["config"] else info["wrapped"]


def file_tensors(directory: Path) -> dict[str, torch.Tensor]:
    safe = directory / WEIGHT_FILES[0]
    if safe.exists():
        return load_file(safe)
    return torch.load(directory / WEIGHT_FILES[1], weights_only=True)


def own_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return what the file holds of the adapter: PEFT 0.18 adds base tensors of ``lora_head``."""
    tensors = file_tensors(directory)
    saved = "modules_to_save" in directory.name
    base = ("base_layer", "original_module", "modules_to_save", *(() if saved else ("bias",)))
    stray = re.compile(rf".*\.lora_head(\.({'|'.join(base)}).*)?")
    if "peft-0.18.1" not in directory.parts:
        return tensors
    return {key: tensors[key] for key in tensors if not stray.fullmatch(key)}


def quiet_load(model: nn.Module, directory: Path) -> LoraConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_peft(model, directory)


def assert_outputs(
    run_golden: Run, model: nn.Module, io: dict[str, torch.Tensor], folder: str
) -> None:
    tolerance = case_info(case_of(folder))["tolerance"]
    difference = (run_golden(model, io) - expected_output(io, folder)).abs().max()
    # Even the base differs by this much between processors (zero_init allows 0).
    assert difference <= max(tolerance["active"], 1e-5)


def test_every_case_is_listed_once() -> None:
    with_folder = {case_of(folder) for folder in adapter_folders()}
    without = [case for case in all_cases() if case not in with_folder]
    known = "|".join([NOT_A_DIRECTORY, *NEVER_CREATED])
    assert [case for case in without if not re.fullmatch(known, case)] == []
    assert len(READABLE) >= 58


@pytest.mark.parametrize("folder", READABLE)
def test_adapter_loads_runs_and_merges_as_the_tool_computed(
    folder: str, golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    case = case_of(folder)
    io, tolerance = load_file(ROOT / case / "io.safetensors"), case_info(case)["tolerance"]
    model = golden_model(case)
    torch.testing.assert_close(run_golden(model, io), io["y_base"], rtol=0, atol=1e-5)
    quiet_load(model, path_of(folder))

    found, wanted = adapters(model), expected_layers(folder)
    assert set(found) == set(wanted)
    for fqn, tensors in found.items():
        facts = wanted[fqn]
        assert (tensors.rank, tensors.alpha) == (facts["r"], facts["alpha"])
        assert tensors.scale == pytest.approx(facts["scale"], rel=1e-12)
        delta = tensors.scale * tensors.B.flatten(1) @ tensors.A.flatten(1)
        # The tool computed the norm of a half precision delta in half precision.
        precision = 1e-5 if "saved_" not in case else 1e-3
        assert delta.norm().item() == pytest.approx(facts["delta_norm"], rel=precision, abs=1e-7)
    stored = own_tensors(path_of(folder))
    assert {f"base_model.model.{key}" for key in adapter_state(model)} == set(stored)

    assert_outputs(run_golden, model, io, folder)
    with adapter_off(model):
        off = run_golden(model, io)
    of_tool = "y_base" if re.fullmatch(OFF_IS_THE_BASE, case) else "y_disabled"
    torch.testing.assert_close(off, io.get(of_tool, io["y_base"]), rtol=0, atol=1e-5)
    state = dict(merged_state(model))
    for key in [key for key in io if key.startswith("merged.")]:
        torch.testing.assert_close(state[key.removeprefix("merged.")], io[key], rtol=0, atol=1e-5)
    if "y_merged" in io:
        plain = golden_model(case)
        plain.load_state_dict(state, strict=True)
        difference = (run_golden(plain, io) - io["y_merged"]).abs().max()
        assert difference <= max(tolerance["merged"], 1e-5)


@pytest.mark.parametrize("folder", [f for f in READABLE if not converted(f)])
def test_written_back_it_is_the_same_file_and_runs_the_same(
    folder: str, tmp_path: Path, golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    case, source = case_of(folder), path_of(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config, state = read_peft(source)
    save_peft(state, tmp_path / "copy", config, base_model=None)
    before, after = own_tensors(source), file_tensors(tmp_path / "copy")
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key])
    model = golden_model(case)
    quiet_load(model, tmp_path / "copy")
    assert_outputs(run_golden, model, load_file(ROOT / case / "io.safetensors"), folder)
    assert_same_meaning(source, tmp_path / "copy", config)


def assert_same_meaning(source: Path, copy: Path, config: LoraConfig) -> None:
    stock = json.loads((source / "adapter_config.json").read_text())
    ours = json.loads((copy / "adapter_config.json").read_text())
    # Start schemes that keep the base are read as the default; inference_mode is PEFT's own flag.
    for key in set(ours) - {"init_lora_weights", "inference_mode"}:
        one, two = stock.get(key), ours[key]
        if isinstance(two, list):
            one = sorted([one] if isinstance(one, str) else one)
        assert (one or None) == (two or None), key
    start = stock["init_lora_weights"]
    assert ours["init_lora_weights"] == (True if start in ("mica", "orthogonal") else start)


@pytest.mark.parametrize("folder", [f for f in READABLE if converted(f)])
def test_started_from_the_base_it_is_written_as_a_plain_adapter_of_twice_the_rank(
    folder: str, tmp_path: Path, golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    source, model = path_of(folder), golden_model(case_of(folder))
    io = load_file(ROOT / case_of(folder) / "io.safetensors")
    with pytest.raises(LoraError, match=r"init_lora_weights is .*load_peft"):
        read_peft(source)
    config = load_peft(model, source)
    save_peft(model, tmp_path / "copy", config, base_model=None)
    written = json.loads((tmp_path / "copy" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (2 * config.rank, 2 * config.alpha)
    assert written["init_lora_weights"] is True
    again = golden_model(case_of(folder))
    load_peft(again, tmp_path / "copy")
    assert_outputs(run_golden, again, io, folder)
    # PEFT's own "disabled" is the residual base: the same as an adapter that adds nothing.
    assert not torch.allclose(io["y_disabled"], io["y_base"], atol=1e-2)
    for layer in lora_layers(model).values():
        layer.up.data.zero_()
    torch.testing.assert_close(run_golden(model, io), io["y_disabled"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["peft-0.21.2/bias_all", "peft-0.21.2/bias_lora_only"])
def test_disabled_as_peft_does_it_keeps_the_trained_biases(
    case: str, golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    io, model = load_file(ROOT / case / "io.safetensors"), golden_model(case)
    load_peft(model, ROOT / case)
    for layer in lora_layers(model).values():
        layer.up.data.zero_()
    assert not torch.allclose(io["y_disabled"], io["y_base"], atol=1e-2)
    torch.testing.assert_close(run_golden(model, io), io["y_disabled"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["two_adapters", "two_adapters_prefix_names"])
def test_two_adapters_in_one_model_alone_and_together(
    case: str, golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    case = f"peft-0.21.2/{case}"
    io, model = load_file(ROOT / case / "io.safetensors"), golden_model(case)
    folders = [folder for folder in READABLE if case_of(folder) == case]
    for folder in folders:
        load_peft(model, path_of(folder), name=folder.split(":")[1])
    names = adapter_names(model)
    assert len(names) == 2
    for name in names:
        with active_adapter(model, name):
            torch.testing.assert_close(
                run_golden(model, io), io[f"y_active.{name}"], rtol=0, atol=1e-4
            )
    with active_adapter(model, *names):
        torch.testing.assert_close(run_golden(model, io), io["y_active.both"], rtol=0, atol=1e-4)
        merged = golden_model(case)
        merged.load_state_dict(dict(merged_state(model)), strict=True)
    torch.testing.assert_close(run_golden(merged, io), io["y_active.both"], rtol=0, atol=3e-4)
    with adapter_off(model):
        torch.testing.assert_close(run_golden(model, io), io["y_base"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", REFUSED_FOLDERS)
def test_unsupported_adapter_is_refused_by_name_before_any_change(
    folder: str, golden_model: Callable[[str], nn.Module]
) -> None:
    model = golden_model(case_of(folder))
    before = str(model)
    with pytest.raises(LoraError, match=expected_error(folder)):
        load_peft(model, path_of(folder))
    assert str(model) == before


@pytest.mark.parametrize(
    "case", [c for c in all_cases() if re.fullmatch("|".join(NEVER_CREATED), c)]
)
def test_targets_that_the_tool_refuses_are_refused(
    case: str, golden_model: Callable[[str], nn.Module]
) -> None:
    fields = case_info(case)["config"]
    targets = fields["target_modules"]
    config = LoraConfig.from_fields(
        {
            "r": fields["r"],
            "lora_alpha": fields["lora_alpha"],
            "target_modules": targets,
            "layers_to_transform": fields.get("layers_to_transform"),
        }
    )
    with pytest.raises(LoraError, match="no module matched"):
        inject(golden_model(case), config, generator=torch.Generator())


@pytest.mark.parametrize("case", ["saved_bf16", "saved_fp16"])
def test_half_precision_base_with_float32_and_half_adapters(
    case: str, golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    case = f"peft-0.21.2/{case}"
    io = load_file(ROOT / case / "io.safetensors")
    dtype = io["y_active_half_base"].dtype
    for adapter_dtype, suffix in ((dtype, ""), (torch.float32, "_fp32_adapter")):
        model = golden_model(case).to(dtype)
        load_peft(model, ROOT / case, dtype=adapter_dtype)
        half_io = {**io, "x": io["x"].to(dtype)}
        expected = io[f"y_active_half_base{suffix}"].float()
        error = (run_golden(model, half_io).float() - expected).norm() / expected.norm()
        assert error <= case_info(case)["tolerance"]["half_base_rel_l2"]


def test_untouched_adapter_gives_the_base_output_bit_for_bit(
    golden_model: Callable[[str], nn.Module], run_golden: Run
) -> None:
    case = "peft-0.21.2/zero_init"
    io, model = load_file(ROOT / case / "io.safetensors"), golden_model(case)
    before = run_golden(model.requires_grad_(False), io)
    load_peft(model, ROOT / case)
    assert torch.equal(run_golden(model, io), before)


def test_stray_base_tensor_in_the_file_warns(golden_model: Callable[[str], nn.Module]) -> None:
    with pytest.warns(UserWarning, match=r"no adapter tensors, ignored: .*lora_head"):
        load_peft(golden_model("peft-0.18.1/name_weight"), ROOT / "peft-0.18.1/name_weight/weight")
