"""What a file is, from headers alone; every format by its own name."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drl.errors import BadInput
from drl.formats.adapter import Adapter
from drl.formats.describe import describe, target_of
from drl.formats.description import lines, size_text
from drl.formats.detect import Format, detect
from drl.formats.layout import ComponentLayout
from drl.formats.write import write_adapter

MakeAdapter = Callable[..., Adapter]
MakePipeline = Callable[..., Path]


@pytest.mark.parametrize(
    ("name", "found", "component"),
    [
        ("peft", Format.PEFT, "adapter"),
        ("diffusers", Format.DIFFUSERS, "transformer"),
        ("kohya", Format.KOHYA, "lora_unet"),
        ("comfy", Format.COMFY, "diffusion_model"),
    ],
)
def test_every_format_that_is_written_is_told(
    name: str,
    found: Format,
    component: str,
    tmp_path: Path,
    toy_layout: dict[str, ComponentLayout],
    make_adapter: MakeAdapter,
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights, rank=3, alpha=6.0)
    out = write_adapter(adapter, name, tmp_path / "a.safetensors", toy_layout)
    assert detect(out) is found
    facts = describe(out)
    one = facts["components"][component]
    assert facts["title"] == str(found)
    assert (one["modules"], one["ranks"]) == (4, {"3": 4})
    assert (one["alphas"], one["scales"], one["dtypes"]) == ({"6": 4}, {"2": 4}, {"F32": 8})
    assert facts["bytes"] > 0
    json.dumps(facts)
    text = "\n".join(lines(facts))
    assert str(found) in text
    assert "scale    2" in text


GOLDEN = {
    "peft-0.21.2/experts_both": ("peft", "expert adapters of peft >= 0.19.1 (written by 0.21.2)"),
    "peft-0.18.1/experts_both": ("peft", "expert adapters of peft < 0.19.1 (written by 0.18.1)"),
    "peft-0.19.0/experts_both": ("peft", "expert adapters of peft < 0.19.1 (written by 0.19.0)"),
    "derived/old_both_no_version": ("peft", "unknown era: peft_version is missing"),
    "veomni-0.1.11/moe_independent": ("peft", "expert adapters of VeOmni, mode independent"),
    "veomni-0.1.11/moe_shared": ("peft", "expert adapters of VeOmni, mode shared"),
    "veomni-0.1.11/moe_shared_no_block": ("peft", "VeOmni, mode shared (by their shapes)"),
    "veomni-0.1.11/moe_independent_no_block": ("peft", "mode independent (by their shapes)"),
    "peft-0.21.2/dora": ("peft", "DoRA, which drl does not read"),
    "peft-0.21.2/bias_all": ("peft", "it also trained biases (all)"),
    "peft-0.21.2/modules_to_save": ("peft", "fully trained modules beside its matrices"),
    "peft-0.21.2/rslora": ("peft", "alpha / sqrt(rank)"),
    "broken/config_peft_type_ia3": ("peft", "'IA3', not LORA"),
    "diffusers-0.42.1/sd3_plain/save_lora_weights": ("diffusers", "scale    2"),
    "diffusers-0.42.1/sd3_plain/save_lora_adapter": ("diffusers", "model: 23 modules"),
    "diffusers-0.42.1/sd3_plain/save_lora_weights_no_metadata": ("diffusers", "at scale 1.0"),
    "diffusers-0.42.1/sd3_patterns_rslora/save_lora_weights": ("diffusers", "rank     4 (5)"),
    "diffusers-0.42.1/sd3_kohya_flat/kohya.safetensors": ("kohya", "lora_unet: 23 modules"),
    "diffusers-0.42.1/sd3_kohya_no_alpha/kohya.safetensors": ("kohya", "at scale 1.0"),
    "diffusers-0.42.1/sd3_comfy_diffusion_model/comfy.safetensors": ("comfy", "scale    2"),
    "diffusers-0.42.1/sd3_old_diffusers_lora_down_up": ("old_diffusers", "no alpha anywhere"),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_files_are_named(case: str, golden: Path) -> None:
    name, words = GOLDEN[case]
    path = golden / case
    if case.endswith("lora_down_up"):
        path /= "pytorch_lora_weights.safetensors"
    facts = describe(path)
    assert facts["format"] == name
    assert words in "\n".join(lines(facts))


@pytest.mark.parametrize(
    "case", ["patterns", "rslora", "alpha_float", "conv", "bin_format", "plain"]
)
def test_ranks_and_scales_are_those_that_peft_has(case: str, golden: Path) -> None:
    place = golden / "peft-0.21.2" / case
    wrapped = json.loads((place / "case.json").read_text())["wrapped"].values()
    one = describe(place)["components"]["adapter"]
    assert one["modules"] == len(wrapped)
    for key, field in (("ranks", "r"), ("scales", "scale")):
        wanted: dict[str, int] = {}
        for layer in wrapped:
            text = f"{layer[field]:g}"
            wanted[text] = wanted.get(text, 0) + 1
        assert one[key] == wanted


def test_targets_are_grouped_over_blocks() -> None:
    assert target_of("transformer_blocks.3.attn.to_out.0") == "transformer_blocks.*.attn.to_out.0"
    assert target_of("joint_blocks_3_x_block_mlp_fc1") == "joint_blocks_*_x_block_mlp_fc1"
    assert target_of("proj_out") == "proj_out"


def test_pipelines_components_and_bare_weights(tmp_path: Path, make_pipeline: MakePipeline) -> None:
    folder = make_pipeline(tmp_path / "p", {"transformer": {"x": (4, 4)}, "vae": {"y": (2, 2)}})
    facts = describe(folder)
    assert facts["format"] == "pipeline"
    assert facts["parts"]["transformer"]["tensors"] == 2
    assert facts["bytes"] == 4 * (16 + 4 + 4 + 2)
    part = describe(folder / "transformer")
    assert (part["format"], part["class"]) == ("component", "Toy")
    bare = describe(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert (bare["format"], bare["tensors"]) == ("weights", 2)
    (folder / "drl_export.json").write_text('{"from": "runs/a", "base": "owner/base"}')
    assert "merged     runs/a into owner/base" in "\n".join(lines(describe(folder)))


def test_what_is_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither adapter_config.json nor pytorch_lora_weights"):
        describe(tmp_path)
    with pytest.raises(BadInput, match="there is no file or folder"):
        describe(tmp_path / "gone")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"neither adapter_model.safetensors nor"):
        describe(tmp_path)


def test_damaged_metadata_is_named(tmp_path: Path) -> None:
    tensors = {"transformer.x.lora_A.weight": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": "{"})
    with pytest.raises(BadInput, match="lora_adapter_metadata is no JSON"):
        describe(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (16.0, torch.bfloat16),
        (0.5, torch.float16),
        (3.25, torch.float32),
        (7.5, torch.float64),
        (4, torch.int64),
        (4, torch.int32),
    ],
)
def test_alphas_are_read_in_every_dtype(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    tensors = {
        "lora_unet_x.lora_down.weight": torch.ones(2, 3),
        "lora_unet_x.alpha": torch.tensor(value, dtype=dtype),
        "lora_unet_x.lora_up.weight": torch.ones(3, 2),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    one = describe(tmp_path / "a.safetensors")["components"]["lora_unet"]
    assert one["alphas"] == {f"{value:g}": 1}
    assert one["scales"] == {f"{value / 2:g}": 1}


def test_a_file_of_100_megabytes_is_told_in_well_under_a_second(tmp_path: Path) -> None:
    tensors = {}
    for number in range(100):
        name = f"lora_unet_blocks_{number}_to_q"
        tensors[f"{name}.lora_down.weight"] = torch.zeros(32, 4096)
        tensors[f"{name}.lora_up.weight"] = torch.zeros(4096, 32)
        tensors[f"{name}.alpha"] = torch.tensor(16.0)
    file = tmp_path / "large.safetensors"
    save_file(tensors, file)
    assert file.stat().st_size > 100_000_000
    start = time.perf_counter()
    facts = describe(file)
    assert time.perf_counter() - start < 0.5
    assert facts["components"]["lora_unet"]["scales"] == {"0.5": 100}


LIGHT = """
import sys
for name in ("torch", "diffusers", "transformers", "peft", "pydantic"):
    sys.modules[name] = None
from pathlib import Path
from drl.formats.describe import describe
from drl.formats.description import lines
print(*lines(describe(Path(sys.argv[1]))), sep="\\n")
"""


def test_looking_at_a_file_needs_no_torch(
    tmp_path: Path, make_adapter: MakeAdapter, toy_layout: dict[str, ComponentLayout]
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    for name in ("peft", "diffusers", "kohya"):
        out = write_adapter(adapter, name, tmp_path / f"{name}.safetensors", toy_layout)
        program = [sys.executable, "-c", LIGHT, str(out)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "rank     2" in done.stdout


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 bytes"), (1500, "1.5 kB"), (2_500_000, "2.5 MB"), (10**10, "10.0 GB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size_text(count) == text
