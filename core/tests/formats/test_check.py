"""Checks of adapters: every broken golden file has its message, sound ones have none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.check import problems_of
from drl.formats.layout import ComponentLayout
from drl.formats.write import write_adapter
from drl.lora import LoraConfig

Layout = dict[str, ComponentLayout]
MakeAdapter = Callable[..., Adapter]


def test_a_sound_adapter_has_no_problem(
    tmp_path: Path, toy_layout: Layout, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    for name in ("peft", "kohya"):
        out = write_adapter(adapter, name, tmp_path / f"{name}.safetensors", toy_layout)
        assert problems_of(out, toy_layout) == []


def test_an_adapter_of_another_base_names_module_and_shape(
    tmp_path: Path, make_adapter: MakeAdapter, toy_layout: Layout
) -> None:
    adapter = make_adapter({"mid.to_q": (6, 9), "gone": (4, 4)})
    out = write_adapter(adapter, "peft", tmp_path / "a", None)
    problems = problems_of(out, toy_layout)
    assert len(problems) == 2
    assert "no gone" in problems[0]
    assert "[6, 9], the base has [6, 4]" in problems[1]
    assert problems_of(out, None) == []


def test_modules_that_a_loader_would_add_untrained_are_named(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    config = LoraConfig(rank=2, alpha=4, target_modules=("to_q",))
    weights = {"blocks.0.to_q": (4, 4), "blocks.1.to_q": (4, 4), "blocks.2.to_k": (4, 4)}
    adapter = make_adapter(weights, "blocks.0.to_q")
    adapter = Adapter(components=adapter.components, configs={"transformer": config})
    out = write_adapter(adapter, "peft", tmp_path / "a", None)
    layout = {"transformer": ComponentLayout(class_name="Toy", weights=weights)}
    (problem,) = problems_of(out, layout)
    assert "blocks.1.to_q" in problem
    assert "to_k" not in problem


@pytest.mark.parametrize("blank", ["B", "alpha"])
def test_an_adapter_without_effect_is_a_problem(tmp_path: Path, blank: str) -> None:
    B = torch.zeros(4, 2) if blank == "B" else torch.ones(4, 2)
    layer = AdapterLayer(A=torch.ones(2, 4), B=B, alpha=0.0 if blank == "alpha" else 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = Adapter(components={"transformer": {"x": layer}})
        out = write_adapter(adapter, "peft", tmp_path / "a", None)
        (problem,) = problems_of(out, None)
    assert "has no effect" in problem


def broken_outcomes() -> dict[str, str]:
    """Which broken golden folders must be refused, by the first word of their expectation."""
    return {
        "bin_with_objects": "weights_only",
        "config_alpha_null": "lora_alpha",
        "config_bad_bias": "bias",
        "config_bad_json": "JSON",
        "config_layer_replication": "layer_replication",
        "config_no_peft_type": "peft_type",
        "config_no_targets": "target",
        "config_not_object": "object",
        "config_r_negative": "-4",
        "config_r_string": "'4'",
        "config_r_zero": "0",
        "config_use_dora_flag_only": "use_dora",
        "empty_file": "empty",
    }


@pytest.mark.parametrize("case", broken_outcomes())
def test_broken_golden_files_are_refused_by_name(case: str, golden: Path) -> None:
    with pytest.raises(BadInput, match=broken_outcomes()[case]):
        problems_of(golden / "broken" / case, None)


def test_every_refused_broken_folder_is_bad_input(golden: Path) -> None:
    """Whatever is wrong with a file, it is one clear error: never a traceback of another kind."""
    layout = {"transformer": ComponentLayout(class_name="Toy", weights=toy_weights(golden))}
    folders = sorted(path for path in (golden / "broken").iterdir() if path.is_dir())
    refused = {folder.name for folder in folders if is_refused(folder, layout)}
    assert "_good" not in refused
    assert "bin_and_safetensors" not in refused
    assert len(refused) >= 25


def is_refused(folder: Path, layout: Layout) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(problems_of(folder, layout))
        except BadInput as error:
            return bool(str(error))


def toy_weights(golden: Path) -> dict[str, tuple[int, ...]]:
    from drl.formats.headers import read_header

    header = read_header(golden / "_bases" / "toy" / "base.safetensors")
    return {
        name.removesuffix(".weight"): facts.shape
        for name, facts in header.tensors.items()
        if name.endswith(".weight") and len(facts.shape) > 1
    }
