"""Writing: proven by reading again, whole or not at all, never over something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drl.errors import BadInput, DrlError
from drl.formats.adapter import Adapter, AdapterLayer, converted
from drl.formats.layout import ComponentLayout
from drl.formats.read import read_adapter
from drl.formats.write import ADAPTER_FORMATS, check_same, fresh, write_adapter

MakeAdapter = Callable[..., Adapter]
AssertSame = Callable[..., None]
Layout = dict[str, ComponentLayout]


def target(folder: Path, name: str) -> Path:
    return folder / ("a.safetensors" if name in ("kohya", "comfy") else "a")


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ADAPTER_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_brings_the_adapter_back(
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
    toy_layout: Layout,
    make_adapter: MakeAdapter,
    assert_same: AssertSame,
) -> None:
    adapter = converted(make_adapter(toy_layout["transformer"].weights, alpha=3.0), dtype)
    out = write_adapter(adapter, name, target(tmp_path, name), toy_layout)
    again = read_adapter(out, layout=toy_layout)
    assert_same(adapter, again, 0)
    assert {layer.A.dtype for layer in again.components["transformer"].values()} == {dtype}
    assert content(tmp_path) == [out.name]


@pytest.mark.parametrize("name", ADAPTER_FORMATS)
def test_formats_turn_into_each_other_and_keep_mixed_strengths(
    name: str,
    tmp_path: Path,
    toy_layout: Layout,
    make_layer: Callable[..., AdapterLayer],
    assert_same: AssertSame,
) -> None:
    weights = toy_layout["transformer"].weights
    layers = {
        path: make_layer(shape, rank=number + 1, alpha=0.5 + number, seed=number)
        for number, (path, shape) in enumerate(weights.items())
    }
    adapter = Adapter(components={"transformer": layers})
    current = adapter
    for step in (name, *ADAPTER_FORMATS):
        (tmp_path / step).mkdir(exist_ok=True)
        out = target(tmp_path / step, step)
        if out.exists():
            out = out.with_name("again" + out.suffix)
        current = read_adapter(write_adapter(current, step, out, toy_layout), layout=toy_layout)
        assert_same(adapter, current, 0)


def test_diffusers_is_a_file_or_a_folder_by_the_name_of_out(
    tmp_path: Path, toy_layout: Layout, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    write_adapter(adapter, "diffusers", tmp_path / "folder", None)
    write_adapter(adapter, "diffusers", tmp_path / "file.safetensors", None)
    assert content(tmp_path / "folder") == ["pytorch_lora_weights.safetensors"]
    assert (tmp_path / "file.safetensors").is_file()


@pytest.mark.parametrize("name", ADAPTER_FORMATS)
def test_what_is_there_is_never_overwritten(
    name: str, tmp_path: Path, toy_layout: Layout, make_adapter: MakeAdapter
) -> None:
    out = target(tmp_path, name)
    adapter = make_adapter(toy_layout["transformer"].weights)
    out.write_text("precious")
    with pytest.raises(BadInput, match="exists already"):
        write_adapter(adapter, name, out, toy_layout)
    assert out.read_text() == "precious"
    out.unlink()
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="exists already"):
        write_adapter(adapter, name, out, toy_layout)
    assert content(tmp_path) == [out.name]


@pytest.mark.parametrize("name", ["kohya", "comfy"])
def test_single_files_need_a_suffix_and_a_base(
    name: str, tmp_path: Path, toy_layout: Layout, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    with pytest.raises(BadInput, match=r"end its name in \.safetensors"):
        write_adapter(adapter, name, tmp_path / "a", toy_layout)
    with pytest.raises(BadInput, match="--base"):
        write_adapter(adapter, name, tmp_path / "a.safetensors", None)
    assert content(tmp_path) == []


@pytest.mark.parametrize("name", ["folder", "file.safetensors"])
def test_a_failure_leaves_nothing(tmp_path: Path, name: str) -> None:
    def fail() -> None:
        with fresh(tmp_path / name) as place:
            if name == "folder":
                place.mkdir()
                (place / "half").write_text("x")
            else:
                place.write_text("x")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert content(tmp_path) == []


def test_a_read_only_place_is_bad_input(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(BadInput, match="cannot write"):
            write_adapter(make_adapter({"x": (4, 4)}), "peft", tmp_path / "a", None)
    finally:
        tmp_path.chmod(0o700)


def test_a_place_below_a_file_is_bad_input(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot write"):
        write_adapter(make_adapter({"x": (4, 4)}), "peft", tmp_path / "file" / "a", None)


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.write import write_adapter
layer = AdapterLayer(A=torch.randn(8, 4096), B=torch.randn(4096, 8), alpha=8.0)
adapter = Adapter(components={"transformer": {"x": layer}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for name in ("peft", "diffusers"):
    try:
        write_adapter(adapter, name, Path(sys.argv[1]) / name, None)
    except BadInput as error:
        assert "cannot write" in str(error), error
    else:
        raise SystemExit("it was written")
"""


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path) == []


def test_a_file_that_changed_on_the_way_is_noticed(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter({"x": (4, 4)})
    out = write_adapter(adapter, "diffusers", tmp_path / "a.safetensors", None)
    tensors = load_file(out)
    tensors["transformer.x.lora_B.weight"] *= 1.001
    save_file(tensors, tmp_path / "b.safetensors", metadata={"format": "pt"})
    different = pytest.raises(DrlError, match=r"transformer.x came back different \(relative")
    with pytest.warns(UserWarning, match="scale 1.0"), different:
        check_same(adapter, tmp_path / "b.safetensors", None)


def test_a_file_without_its_strength_is_noticed(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter({"x": (4, 4)}, alpha=8.0)
    out = write_adapter(adapter, "diffusers", tmp_path / "a.safetensors", None)
    save_file(load_file(out), tmp_path / "b.safetensors")
    with pytest.warns(UserWarning, match="scale 1.0"), pytest.raises(DrlError, match="different"):
        check_same(adapter, tmp_path / "b.safetensors", None)
