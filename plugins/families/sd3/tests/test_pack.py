"""Packing a trained transformer, and the prompt files of the recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drl.api import BadInput
from drl_family_sd3.glyphs.__main__ import main
from drl_family_sd3.glyphs.pack import pack, write_prompts
from drl_family_sd3.glyphs.words import dev_words, rl_words, test_words
from drl_family_sd3.tiny import build_random

RECIPES = Path(__file__).resolve().parents[4] / "recipes" / "glyphs"
TRANSFORMER = Path("transformer") / "diffusion_pytorch_model.safetensors"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "built"
    build_random(folder, seed=0)
    return folder


def test_packed_weights_are_the_trained_ones_in_half_precision(
    pipeline: Path, tmp_path: Path
) -> None:
    trained = {
        name: tensor + 0.25 if tensor.is_floating_point() else tensor
        for name, tensor in load_file(pipeline / TRANSFORMER).items()
    }
    save_file(trained, tmp_path / "trained.safetensors")
    main(["pack", str(pipeline), str(tmp_path / "trained.safetensors"), str(tmp_path / "packed")])
    packed = load_file(tmp_path / "packed" / TRANSFORMER)
    assert {tensor.dtype for tensor in packed.values()} == {torch.float16}
    assert all(torch.equal(packed[name], trained[name].half()) for name in trained)


def test_weights_of_another_model_are_refused(pipeline: Path, tmp_path: Path) -> None:
    save_file({"proj.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(BadInput, match=r"does not fit.*proj\.weight"):
        pack(pipeline, tmp_path / "other.safetensors", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_recipes_hold_the_prompts_of_the_word_lists(tmp_path: Path) -> None:
    for file in write_prompts(tmp_path):
        assert file.read_bytes() == (RECIPES / file.name).read_bytes()


def test_held_out_words_are_in_no_other_list() -> None:
    lists = [set(words()) for words in (rl_words, dev_words, test_words)]
    assert len(lists[2]) >= 64
    assert sum(len(words) for words in lists) == len(set().union(*lists))
