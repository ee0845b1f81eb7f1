"""Adapter directories appear complete or not at all, and never replace anything else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drl.lora import LoraConfig, LoraError, inject, save_peft, tensor_file

FILES = ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]
CONFIG = LoraConfig(rank=4, alpha=6, target_modules=("proj_out", "to_q"))


@pytest.fixture
def adapted(toy: nn.Module, perturb: Callable[[nn.Module], None]) -> nn.Module:
    inject(toy, CONFIG, generator=torch.Generator().manual_seed(0))
    perturb(toy)
    return toy


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_earlier_adapter_is_replaced_as_a_whole(adapted: nn.Module, tmp_path: Path) -> None:
    target = tmp_path / "a"
    save_peft(adapted, target, CONFIG, base_model="one")
    (target / "adapter_model.bin").write_bytes(b"old")
    save_peft(adapted, target, CONFIG, base_model="two")
    assert names_in(target) == FILES
    assert names_in(tmp_path) == ["a"]
    assert json.loads((target / FILES[0]).read_text())["base_model_name_or_path"] == "two"


def test_an_empty_directory_and_a_link_may_be_filled(adapted: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        save_peft(adapted, tmp_path / "link", CONFIG, base_model=None)
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "real") == FILES


def test_a_directory_with_other_content_is_never_overwritten(
    adapted: nn.Module, tmp_path: Path
) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "results.txt").write_text("keep me")
    with pytest.raises(LoraError, match=r"results.txt"):
        save_peft(adapted, target, CONFIG, base_model=None)
    (target / "adapter_config.json").write_text("{}")
    with pytest.raises(LoraError, match=r"results.txt"):
        save_peft(adapted, target, CONFIG, base_model=None)
    assert (target / "results.txt").read_text() == "keep me"
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoraError, match="is a file"):
        save_peft(adapted, tmp_path / "file", CONFIG, base_model=None)


@pytest.mark.parametrize("calls_that_work", [0, 1])
def test_a_failed_write_leaves_the_old_adapter_and_no_rubbish(
    adapted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls_that_work: int
) -> None:
    target = tmp_path / "a"
    save_peft(adapted, target, CONFIG, base_model="old")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    real, calls = tensor_file.save_file, []

    def failing(tensors: Any, path: Any, metadata: Any) -> None:
        calls.append(path)
        if len(calls) > calls_that_work:
            raise OSError("disk full")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(tensor_file, "save_file", failing)
    with pytest.raises(LoraError, match=r"cannot be written .*disk full"):
        save_peft(adapted, target, CONFIG, base_model="new")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert names_in(tmp_path) == ["a"]


def test_a_failed_swap_puts_the_old_adapter_back(
    adapted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a"
    save_peft(adapted, target, CONFIG, base_model="old")
    real = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("no")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(LoraError, match=r"\(no\)"):
        save_peft(adapted, target, CONFIG, base_model="new")
    assert json.loads((target / FILES[0]).read_text())["base_model_name_or_path"] == "old"
    assert names_in(tmp_path) == ["a"]


def test_every_file_is_flushed_before_the_directory_appears(
    adapted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        seen.append((name, (tmp_path / "a").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    save_peft(adapted, tmp_path / "a", CONFIG, base_model=None)
    assert {name for name, appeared in seen if not appeared} >= set(FILES)
