"""What stays in memory, what is given back, and that nothing of it changes a bit."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from drl.api import BadInput, ConditionRecord, Context, Media
from drl.model.compiled import Compilations
from drl_family_sd3 import pipeline as pipeline_module
from drl_family_sd3 import prompts as prompts_module
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.pipeline import Sd3Pipeline
from drl_family_sd3.residence import Resident

KNOWN = ("a sign", 'a sign "WIND"', " ")


def made(checkpoint: str, **options: Any) -> Sd3Pipeline:
    return Sd3Pipeline(checkpoint, Sd3Options.model_validate(options), Context())


def equal(one: ConditionRecord, other: ConditionRecord) -> bool:
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def loaded(pipeline: Sd3Pipeline) -> list[bool]:
    encoders = pipeline.text.encoders
    assert encoders.t5.encoder is not None
    parts = [*(clip.encoder for clip in encoders.clips), encoders.t5.encoder]
    return [part.module is not None for part in parts]


def latents(rows: int) -> Tensor:
    return torch.randn(rows, 4, 16, 24, generator=torch.Generator().manual_seed(3))


def pixels(pipeline: Sd3Pipeline, rows: int = 3) -> Tensor:
    return torch.stack([media.pixels for media in pipeline.decode({"visual": latents(rows)})])


def test_a_resident_part_is_read_once_and_comes_back_with_every_bit() -> None:
    reads: list[nn.Linear] = []

    def load() -> nn.Linear:
        reads.append(nn.Linear(3, 2))
        return reads[-1]

    part = Resident(load, "cpu")
    part.release()  # never used: nothing is read to be put away
    assert reads == []
    before = {name: tensor.clone() for name, tensor in part.get().state_dict().items()}
    part.release()
    assert part.away
    assert part.get() is reads[0]
    assert not part.away
    assert all(torch.equal(before[n], t) for n, t in part.get().state_dict().items())
    part.drop()
    assert part.get() is reads[1]
    assert len(reads) == 2


def test_a_part_of_the_cpu_is_not_copied_to_be_put_away() -> None:
    part = Resident(lambda: nn.Linear(2, 2), "cpu")
    place = part.get().weight.data_ptr()
    part.release()
    assert part.get().weight.data_ptr() == place


@pytest.mark.parametrize("text_dtype", ["fp32", "bf16", "fp16"])
def test_prompts_encoded_ahead_have_the_bits_of_resident_encoders(
    checkpoint: str, text_dtype: str
) -> None:
    kept = made(checkpoint, text_dtype=text_dtype)
    ahead = made(checkpoint, text_dtype=text_dtype, text_encoders="released")
    ahead.expect(KNOWN)
    for prompt in KNOWN:
        (one,), (other,) = kept.encode_text([prompt]), ahead.encode_text([prompt])
        assert equal(one, other)
        assert {tensor.dtype for tensor in other.tensors.values()} == {torch.float32}


def test_encoders_are_given_back_once_the_known_prompts_are_encoded(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = made(checkpoint, text_encoders="released")
    watched: list[weakref.ref[nn.Module]] = []
    drop = type(pipeline.text.encoders).drop

    def watch(encoders: Any) -> None:
        watched.extend(weakref.ref(clip.encoder.module) for clip in encoders.clips)
        watched.append(weakref.ref(encoders.t5.encoder.module))
        drop(encoders)

    monkeypatch.setattr(type(pipeline.text.encoders), "drop", watch)
    pipeline.expect([*KNOWN, KNOWN[0]])
    gc.collect()
    assert len(watched) == 3
    assert [reference() for reference in watched] == [None] * 3
    assert list(pipeline.text.stored) == [*KNOWN]
    pipeline.encode_text(KNOWN)
    pipeline.expect(KNOWN)  # known already: nothing is read again
    assert loaded(pipeline) == [False] * 3


def test_resident_encoders_take_no_notice(checkpoint: str) -> None:
    pipeline = made(checkpoint)
    pipeline.expect(KNOWN)
    assert loaded(pipeline) == [False] * 3
    pipeline.encode_text(["another"])
    assert loaded(pipeline) == [True] * 3


def test_released_encoders_stay_where_nobody_says_what_comes(checkpoint: str) -> None:
    """An encoder of a data set is asked row by row: reading 11 GB for each would never end."""
    pipeline = made(checkpoint, text_encoders="released")
    pipeline.encode_text(["a", "b"])
    assert loaded(pipeline) == [True] * 3


def test_an_unknown_prompt_is_encoded_once_and_said(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = made(checkpoint, text_encoders="released")
    pipeline.expect(KNOWN)
    with caplog.at_level(logging.WARNING):
        first, again = pipeline.encode_text(["new", "new"])
        assert pipeline.encode_text(["new"])[0] is first is again
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "1 of the prompts were not known at the start (the first: 'new')" in line
    assert "text_encoders = 'resident'" in line
    assert loaded(pipeline) == [False] * 3
    assert equal(first, made(checkpoint).encode_text(["new"])[0])


def test_known_prompts_are_never_forgotten_and_others_beyond_the_cache_are(checkpoint: str) -> None:
    pipeline = made(checkpoint, text_encoders="released", prompt_cache=2)
    pipeline.expect(KNOWN)
    for prompt in ("one", "two", "three"):
        pipeline.encode_text([prompt])
    assert list(pipeline.text.stored) == [*KNOWN, "two", "three"]
    assert len(pipeline.text.latest) == 2


def test_more_new_prompts_than_the_cache_holds_load_the_encoders_once(checkpoint: str) -> None:
    pipeline = made(checkpoint, text_encoders="released", prompt_cache=1)
    pipeline.expect(KNOWN)
    found = pipeline.encode_text(["one", "two", "three"])
    assert loaded(pipeline) == [False] * 3
    assert all(map(equal, found, made(checkpoint).encode_text(["one", "two", "three"])))
    assert list(pipeline.text.stored) == [*KNOWN, "three"]


def test_few_records_stay_on_the_device_beside_released_encoders(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "LATEST_ON_DEVICE", 2)
    pipeline = made(checkpoint, text_encoders="released")
    pipeline.expect(KNOWN)
    pipeline.encode_text(KNOWN)
    assert list(pipeline.text.latest) == [*KNOWN[1:]]
    (latest,) = pipeline.encode_text([KNOWN[2]])
    assert pipeline.encode_text([KNOWN[2]])[0] is latest  # samples of a group share one record


def test_records_that_would_fill_the_memory_are_refused_and_nothing_stays_loaded(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_module, "STORED_SHARE", 1e-9)
    pipeline = made(checkpoint, text_encoders="released")
    with pytest.raises(BadInput, match=r"text_encoders = 'released': the records of 3 prompts"):
        pipeline.expect(KNOWN)
    assert loaded(pipeline) == [False] * 3


@pytest.mark.parametrize("text_encoders", ["resident", "released"])
def test_after_a_release_text_and_pictures_are_as_before(
    checkpoint: str, text_encoders: str
) -> None:
    pipeline = made(checkpoint, text_encoders=text_encoders)
    pipeline.expect(KNOWN)
    before = pipeline.encode_text([*KNOWN]), pixels(pipeline)
    pipeline.release()
    assert pipeline._vae.away
    assert not pipeline.text.latest
    pipeline.release()  # a second one is harmless
    after = pipeline.encode_text([*KNOWN]), pixels(pipeline)
    assert all(map(equal, before[0], after[0]))
    assert torch.equal(before[1], after[1])
    assert not pipeline._vae.away


def test_a_pipeline_that_did_nothing_loads_nothing_to_release_it(checkpoint: str) -> None:
    pipeline = made(checkpoint)
    pipeline.release()
    assert "text" not in vars(pipeline)
    assert pipeline._vae.module is None


def test_a_vae_in_bf16_is_near_the_exact_one_and_gives_float32(checkpoint: str) -> None:
    exact, low = made(checkpoint), made(checkpoint, vae_dtype="bf16")
    one, other = pixels(exact), pixels(low)
    assert other.dtype == torch.float32
    assert low.vae.dtype == torch.bfloat16
    assert not torch.equal(one, other)
    assert float((one - other).abs().max()) < 0.02
    assert torch.equal(pixels(low, 1)[0], other[0])  # neighbours do not matter here either


def test_compiled_blocks_of_the_decoder_make_the_same_pictures(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[Compilations] = []

    def light(label: str) -> Compilations:
        """The same compiler without its code generator, which a CPU takes long for."""
        logs.append(Compilations(label, backend="aot_eager"))
        return logs[-1]

    monkeypatch.setattr(pipeline_module, "Compilations", light)
    plain, compiled = made(checkpoint), made(checkpoint, compile_vae=True)
    assert torch.equal(pixels(plain), pixels(compiled))
    graphs = logs[0].graphs
    assert graphs == 3  # the middle, and two kinds of blocks
    pixels(compiled, 1)
    compiled.release()
    pixels(compiled, 5)
    assert (logs[0].graphs, logs[0].unexpected) == (graphs, 0)


def test_encoding_with_a_vae_in_bf16_draws_the_same_noise(checkpoint: str) -> None:
    media = Media(pixels=torch.rand(3, 1, 32, 48, generator=torch.Generator().manual_seed(1)))
    encoded: Mapping[str, Tensor] = {
        dtype: made(checkpoint, vae_dtype=dtype).encode_media(
            media, torch.Generator().manual_seed(2)
        )["visual"]
        for dtype in ("fp32", "bf16")
    }
    assert encoded["bf16"].dtype == torch.float32
    assert float((encoded["fp32"] - encoded["bf16"]).abs().max()) < 0.1


def test_a_vae_in_fp16_is_refused() -> None:
    with pytest.raises(ValidationError, match="'fp32' or 'bf16'"):
        Sd3Options.model_validate({"vae_dtype": "fp16"})
