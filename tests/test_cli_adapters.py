"""``drl export`` and ``drl adapters``: what they print, what they return, what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained import build_pipeline, train

from drl.formats.read import read_adapter

Drl = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline(tmp_path_factory.mktemp("pipeline") / "tiny-sd3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    return train(tmp_path_factory.mktemp("trained"), pipeline, "eval.datasets=[]")


@pytest.fixture
def kohya(drl: Drl, run: Path, tmp_path: Path) -> Path:
    out = tmp_path / "a.safetensors"
    assert drl("export", str(run), "--format", "kohya", "--out", str(out))[0] == 0
    return out


@pytest.mark.parametrize("name", ["peft", "diffusers", "kohya", "comfy", "merged"])
def test_export_says_what_was_written(drl: Drl, run: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / ("a.safetensors" if name in ("kohya", "comfy") else "a")
    code, text, err = drl("export", str(run), "--format", name, "--out", str(out))
    assert (code, err) == (0, "")
    first, *notes = text.splitlines()
    assert first.startswith(f"{out}: {name}, 15 modules, from ")
    assert first.endswith("read again, equal")
    if name == "diffusers":
        assert "pipe.load_lora_weights" in notes[0]
    if name in ("kohya", "comfy"):
        assert "not for Stable Diffusion 3" in notes[0]
    assert out.exists()


def test_export_options_reach_the_file(drl: Drl, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    arguments = ["--format", "kohya", "--step", "1", "--baked", "--dtype", "bf16"]
    code, text, _ = drl("export", str(run), *arguments, "--out", str(out))
    assert code == 0
    assert "iter_0000001" in text
    tensors = load_file(out)
    key = "lora_unet_joint_blocks_0_x_block_attn_proj"
    assert float(tensors[f"{key}.alpha"]) == 4  # the rank: the scale is in B
    assert tensors[f"{key}.lora_up.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "kohya", "--out", "a"], "end its name in .safetensors"),
        (["--format", "peft", "--out", "a", "--step", "9"], "--step 9"),
        (["--format", "peft", "--out", "a", "--ema"], "no averaged weights"),
        (["--format", "peft", "--out", "a", "--component", "vae"], "--component vae"),
        (["--format", "merged", "--out", "a", "--baked"], "--baked is for adapters"),
        (["--format", "merged", "--out", "a", "--base", "./gone"], "there is no folder ./gone"),
        (["--format", "gguf", "--out", "a"], "gguf"),
        (["--format", "peft"], "--out"),
    ],
)
def test_export_refuses_with_exit_code_2_and_one_message(
    drl: Drl,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = drl("export", str(run), *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "a").exists()


def test_show_names_the_file(drl: Drl, kohya: Path, run: Path) -> None:
    code, text, _ = drl("adapters", "show", str(kohya))
    assert code == 0
    assert "kohya adapter file" in text
    assert "scale    2" in text
    code, text, _ = drl("adapters", "show", str(run))
    assert code == 0
    assert "run directory of drl" in text
    assert "PEFT adapter" in text


def test_show_as_json(drl: Drl, kohya: Path) -> None:
    code, text, _ = drl("adapters", "show", str(kohya), "--json")
    facts = json.loads(text)
    assert code == 0
    assert facts["format"] == "kohya"
    assert facts["components"]["lora_unet"]["scales"] == {"2": 7}
    assert facts["metadata"]["ss_network_module"] == "networks.lora"


def test_show_norms_reads_the_tensors(drl: Drl, run: Path, kohya: Path, pipeline: Path) -> None:
    code, text, _ = drl("adapters", "show", str(run / "adapter"), "--norms", "--json")
    norms = json.loads(text)["norms"]
    assert code == 0
    assert list(norms.values()) == sorted(norms.values(), reverse=True)
    layer = read_adapter(run / "adapter").components["transformer"][
        "transformer_blocks.0.attn.to_q"
    ]
    wanted = torch.linalg.matrix_norm(layer.scale * layer.B @ layer.A).item()
    assert norms["transformer.transformer_blocks.0.attn.to_q"] == pytest.approx(wanted, rel=1e-5)
    assert drl("adapters", "show", str(kohya), "--norms")[0] == 2  # its names need the base
    shown = drl("adapters", "show", str(kohya), "--norms", "--base", str(pipeline))
    assert shown[0] == 0


def test_show_takes_under_a_second_for_100_megabytes(tmp_path: Path) -> None:
    tensors = {
        f"transformer.blocks.{n}.to_q.lora_{matrix}.weight": torch.zeros(shape)
        for n in range(100)
        for matrix, shape in (("A", (32, 4096)), ("B", (4096, 32)))
    }
    file = tmp_path / "large.safetensors"
    save_file(tensors, file)
    assert file.stat().st_size > 100_000_000
    program = [
        sys.executable,
        "-c",
        "import sys; sys.modules['torch'] = None\n"
        "from drl_cli.main import execute\n"
        f"sys.exit(execute(['adapters', 'show', {str(file)!r}]))",
    ]
    start = time.perf_counter()
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert time.perf_counter() - start < 1.0
    assert done.returncode == 0, done.stderr
    assert "100 x blocks.*.to_q" in done.stdout


def test_check_finds_the_base_that_the_adapter_names(drl: Drl, run: Path, pipeline: Path) -> None:
    code, text, err = drl("adapters", "check", str(run / "adapter"))
    assert (code, err) == (0, "")
    assert f"fits {pipeline}" in text
    assert "15 modules" in text


def test_check_of_a_single_file_needs_the_base(drl: Drl, kohya: Path, pipeline: Path) -> None:
    code, _, err = drl("adapters", "check", str(kohya))
    assert code == 2
    assert "--base" in err
    assert drl("adapters", "check", str(kohya), "--base", str(pipeline))[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nan", "non-finite"),
        ("shape", "do not fit"),
        ("missing", "without a matrix"),
        ("stranger", "no modules of the names"),
        ("cut", "damaged, truncated"),
    ],
)
def test_check_names_what_is_wrong(
    drl: Drl, kohya: Path, pipeline: Path, change: str, words: str
) -> None:
    tensors = load_file(kohya)
    key = "lora_unet_joint_blocks_0_x_block_attn_proj.lora_up.weight"
    if change == "nan":
        tensors[key][0, 0] = float("nan")
    elif change == "shape":
        tensors[key] = tensors[key][:, :2].clone()
    elif change == "missing":
        del tensors[key]
    elif change == "stranger":
        tensors = {
            name.replace("joint_blocks_0", "joint_blocks_9"): t for name, t in tensors.items()
        }
    save_file(tensors, kohya)
    if change == "cut":
        kohya.write_bytes(kohya.read_bytes()[:-10])
    code, _, err = drl("adapters", "check", str(kohya), "--base", str(pipeline))
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_check_lists_all_problems(drl: Drl, run: Path, tmp_path: Path) -> None:
    other = build_pipeline(tmp_path / "other")
    file = other / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for block in (0, 1):
        tensors[f"transformer_blocks.{block}.attn.to_q.weight"] = torch.zeros(32, 40)
    save_file(tensors, file, metadata={"format": "pt"})
    code, _, err = drl("adapters", "check", str(run / "adapter"), "--base", str(other))
    assert code == 2
    assert "has 2 problems" in err
    assert err.count("[32, 32], the base has [32, 40]") == 2


def test_diff_of_equal_and_of_different_adapters(drl: Drl, run: Path, tmp_path: Path) -> None:
    code, text, _ = drl("adapters", "diff", str(run / "adapter"), str(run / "adapter"))
    assert code == 0
    assert "0 of 15 layers differ" in text
    first = tmp_path / "first"
    assert drl("export", str(run), "--format", "peft", "--step", "1", "--out", str(first))[0] == 0
    code, text, _ = drl("adapters", "diff", str(run / "adapter"), str(first))
    lines = [line.split() for line in text.splitlines() if line.startswith("    ")]
    sizes = [float(line[0]) for line in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 14  # the last block's context query has no gradient


def test_diff_as_json_over_formats(drl: Drl, run: Path, kohya: Path, pipeline: Path) -> None:
    arguments = [str(run / "adapter"), str(kohya), "--base", str(pipeline), "--json"]
    code, text, _ = drl("adapters", "diff", *arguments)
    facts = json.loads(text)
    assert code == 0
    assert facts["first"]["scale"] == facts["second"]["scale"] == ["2"]
    assert all(row["relative"] < 1e-6 for row in facts["layers"])
    assert len(facts["layers"]) == 15


def test_merge_is_the_weighted_sum(drl: Drl, run: Path, tmp_path: Path) -> None:
    first, out = tmp_path / "first", tmp_path / "sum"
    drl("export", str(run), "--format", "peft", "--step", "1", "--out", str(first))
    code, text, _ = drl(
        "adapters", "merge", f"{run / 'adapter'}:0.7", f"{first}:-0.2", "--out", str(out)
    )
    assert code == 0
    assert "2 adapters by concat" in text
    a, b, total = (read_adapter(p).components["transformer"] for p in (run / "adapter", first, out))
    for path, layer in total.items():
        assert layer.rank == 8
        wanted = (
            0.7 * a[path].scale * a[path].B @ a[path].A
            - 0.2 * b[path].scale * b[path].B @ b[path].A
        )
        torch.testing.assert_close(layer.scale * layer.B @ layer.A, wanted, rtol=0, atol=1e-6)


def test_merge_by_svd_says_what_was_lost(drl: Drl, run: Path, tmp_path: Path) -> None:
    arguments = [str(run / "adapter"), "--method", "svd", "--rank", "2"]
    code, text, _ = drl("adapters", "merge", *arguments, "--out", str(tmp_path / "small"))
    assert code == 0
    assert "the layer that lost most is off by 0." in text
    layers = read_adapter(tmp_path / "small").components["transformer"].values()
    assert {layer.rank for layer in layers} == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{a}:heavy", "--out", "x"], "'heavy' is no number"),
        (["{a}:inf", "--out", "x"], "finite"),
        (["{a}gone:1", "--out", "x"], "there is no file or folder"),
        (["{a}", "--out", "x", "--method", "svd"], "--rank belongs to --method svd"),
        (["{a}", "--out", "x", "--rank", "2"], "--rank belongs to --method svd"),
        (["{a}", "--out", "{a}"], "exists already"),
    ],
)
def test_merge_refuses_with_exit_code_2(
    drl: Drl,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    filled = [argument.format(a=run / "adapter") for argument in arguments]
    code, _, err = drl("adapters", "merge", *filled)
    assert code == 2
    assert words in err
    assert not (tmp_path / "x").exists()


def test_warnings_are_lines_and_not_python(drl: Drl, run: Path, tmp_path: Path) -> None:
    tensors = load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    bare = tmp_path / "bare.safetensors"
    save_file(tensors, bare, metadata={"format": "pt"})
    code, _, err = drl("adapters", "check", str(bare))
    assert code == 0
    assert err.startswith("warning: 15 of 15 modules have no alpha")
    assert ".py" not in err


@pytest.mark.parametrize("command", ["show", "check", "diff", "merge"])
def test_every_adapters_command_teaches_by_example(drl: Drl, command: str) -> None:
    code, text, _ = drl("adapters", command, "--help")
    assert code == 0
    assert text.count(f"drl adapters {command} ") >= 2


@pytest.mark.parametrize("command", ["export", "sample"])
def test_the_other_commands_teach_by_two_examples(drl: Drl, command: str) -> None:
    assert drl(command, "--help")[1].count(f"    drl {command} ") == 2


@pytest.mark.parametrize("arguments", [["export"], ["adapters", "show"], ["sample"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'diffusers', 'pydantic']))\n"
        "from drl_cli.main import execute\n"
        f"sys.exit(execute([*{arguments!r}, '--help']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
