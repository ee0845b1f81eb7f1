"""The outline that ``drl plan`` asks for, against the pipeline that really loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drl.api import VISUAL, BadInput, Context, Sampling
from drl_family_sd3.checkpoint import load_part
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.family import Sd3Family
from drl_family_sd3.pipeline import Sd3Pipeline

SIZE = Sampling(num_steps=4, height=32, width=48)
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def outlined(checkpoint: str, sampling: Sampling = SIZE, **options: Any) -> Any:
    return Sd3Family(Sd3Options.model_validate(options), Context()).outline(checkpoint, sampling)


def test_shapes_are_those_of_the_pipeline(checkpoint: str, pipeline: Sd3Pipeline) -> None:
    found = outlined(checkpoint)
    initial = pipeline.initial(SIZE, torch.Generator().manual_seed(0))
    assert found.streams == {name: tuple(latents.shape) for name, latents in initial.items()}
    (record,) = pipeline.encode_text(["a sign"])
    shapes = {name: tuple(tensor.shape) for name, tensor in record.tensors.items()}
    assert found.condition == shapes
    assert all(tensor.dtype == torch.float32 for tensor in record.tensors.values())
    assert found.text_tokens == shapes["encoder_hidden_states"][0]


@pytest.mark.parametrize("dtype", SIZES)
def test_parts_weigh_what_they_weigh_when_loaded(checkpoint: str, dtype: str) -> None:
    found = outlined(checkpoint, text_dtype=dtype)
    for part in found.parts:
        loaded = load_part(
            checkpoint, part.name, dtype="fp32" if part.name == "vae" else dtype, device="cpu"
        )
        assert part.weight_bytes == sum(
            tensor.numel() * tensor.element_size() for tensor in loaded.parameters()
        ) + sum(tensor.numel() * tensor.element_size() for tensor in loaded.buffers())


def test_released_encoders_are_no_residents_and_the_vae_stays(checkpoint: str) -> None:
    kept = {part.name: part for part in outlined(checkpoint).parts}
    gone = {part.name: part for part in outlined(checkpoint, text_encoders="released").parts}
    assert list(kept) == ["text_encoder", "text_encoder_2", "text_encoder_3", "vae"]
    assert all(part.resident for part in kept.values())
    assert [part.name for part in gone.values() if part.resident] == ["vae"]
    assert kept["text_encoder"].release == 'model.sd3.text_encoders = "released"'
    assert kept["vae"].release is None


def test_a_pipeline_without_t5_has_no_part_of_that_name(checkpoint: str, tmp_path: Path) -> None:
    copy = tmp_path / "bare"
    shutil.copytree(checkpoint, copy)
    index = json.loads((copy / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (copy / "model_index.json").write_text(json.dumps(index))
    found = outlined(str(copy), t5_tokens=5)
    assert [part.name for part in found.parts] == ["text_encoder", "text_encoder_2", "vae"]
    assert found.text_tokens == 16 + 5


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decoding_has_the_shape_of_pictures(checkpoint: str, rows: int, dtype: str) -> None:
    found = outlined(checkpoint, decode_rows=rows, vae_dtype=dtype)
    pictures = found.decode()
    assert pictures.device.type == "meta"
    assert tuple(pictures.shape) == (rows, 3, 32, 48)
    assert pictures.dtype == torch.float32
    assert (found.decode_rows, found.decode_dtype) == (rows, dtype)
    assert found.decode_option == "model.sd3.decode_rows"


def test_a_half_precision_vae_weighs_half(checkpoint: str) -> None:
    whole, half = (outlined(checkpoint, vae_dtype=dtype).parts[-1] for dtype in ("fp32", "bf16"))
    assert whole.weight_bytes == 2 * half.weight_bytes


def test_compiled_decoding_is_told_apart(checkpoint: str) -> None:
    assert not outlined(checkpoint).decode_compiled
    assert outlined(checkpoint, compile_vae=True).decode_compiled


def test_a_size_that_the_model_cannot_make_is_refused(checkpoint: str) -> None:
    with pytest.raises(BadInput, match=r"sampling\.height"):
        outlined(checkpoint, Sampling(num_steps=4, height=33, width=32))


def test_nothing_but_configs_is_read(checkpoint: str, tmp_path: Path) -> None:
    copy = tmp_path / "configs"
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    assert outlined(str(copy)).streams[VISUAL] == outlined(checkpoint).streams[VISUAL]


def test_a_missing_config_is_bad_input(checkpoint: str, tmp_path: Path) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(checkpoint, copy)
    (copy / "text_encoder_2" / "config.json").unlink()
    with pytest.raises(BadInput, match="text_encoder_2"):
        outlined(str(copy))
