"""Text encoders and VAE of family sd3 on the device: what they wait for, hold and cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from gpu.facts import record
from gpu.pipelines import MEDIUM, SMALL, vae, write_pipeline
from gpu.runs import free, no_waiting

from drl.api import Context
from drl.model.compiled import Compilations, compile_blocks
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.pipeline import DECODER_BLOCKS, Sd3Pipeline
from drl_family_sd3.tiny import seeded

pytestmark = pytest.mark.gpu

PROMPTS = tuple(f"sign number {n}" for n in range(4))
ROWS = 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("small-sd3")
    write_pipeline(folder, SMALL, device="cpu", seed=0)
    return str(folder)


@pytest.fixture
def make(small: str, device: str) -> Callable[..., Sd3Pipeline]:
    def made(**options: Any) -> Sd3Pipeline:
        return Sd3Pipeline(small, Sd3Options.model_validate(options), Context(device=device))

    return made


def latents(device: str, side: int = 16, rows: int = ROWS) -> dict[str, torch.Tensor]:
    drawn = torch.randn(rows, 16, side, side, generator=torch.Generator().manual_seed(3))
    return {"visual": drawn.to(device)}


def held(device: str) -> int:
    """Return the bytes that tensors take on the device, 0 on the CPU."""
    free()
    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decoding_waits_for_nothing_and_stays_on_the_device(
    make: Callable[..., Sd3Pipeline], device: str, dtype: str
) -> None:
    pipeline = make(vae_dtype=dtype, decode_rows=4)
    rows = latents(device)
    pipeline.decode(rows)
    with no_waiting(device):
        media = pipeline.decode(rows)
    assert len(media) == ROWS
    assert {one.pixels.device.type for one in media} == {torch.device(device).type}
    assert {one.pixels.dtype for one in media} == {torch.float32}


def test_a_known_prompt_is_uploaded_without_waiting(
    make: Callable[..., Sd3Pipeline], device: str
) -> None:
    resident, released = make(), make(text_encoders="released", prompt_cache=1)
    released.expect(PROMPTS)
    with no_waiting(device):
        records = [released.encode_text([prompt])[0] for prompt in PROMPTS]
    for prompt, found in zip(PROMPTS, records, strict=True):
        (expected,) = resident.encode_text([prompt])
        for name, tensor in expected.tensors.items():
            assert tensor.device.type == torch.device(device).type
            assert torch.equal(found.tensors[name], tensor)


def test_memory_of_encoders_and_vae_is_given_back(
    make: Callable[..., Sd3Pipeline], device: str
) -> None:
    warm = make()  # matrix libraries keep their workspaces from now on
    warm.encode_text(PROMPTS)
    warm.decode(latents(device))
    del warm
    before = held(device)
    released = make(text_encoders="released")
    released.expect(PROMPTS)
    assert held(device) == before
    pipeline = make()
    first = pipeline.encode_text(PROMPTS)[0], pipeline.decode(latents(device))[0].pixels
    kept = {name: tensor.clone() for name, tensor in first[0].tensors.items()}, first[1].clone()
    del first
    full = held(device)
    pipeline.release()
    asleep = held(device)
    if device.startswith("cuda"):
        assert full > asleep
        clones = sum(tensor.nbytes for tensor in (*kept[0].values(), kept[1]))
        assert asleep - before < clones + 64 * 1024  # the allocator rounds up
    (again,) = pipeline.encode_text(PROMPTS[:1])
    assert all(torch.equal(kept[0][name], tensor) for name, tensor in again.tensors.items())
    assert torch.equal(kept[1], pipeline.decode(latents(device))[0].pixels)


@pytest.mark.slow  # a measurement: nothing else may run beside it
@pytest.mark.parametrize("form", ["fp32", "bf16", "bf16 compiled"])
def test_seconds_of_a_decode_at_real_size(
    make: Callable[..., Sd3Pipeline], device: str, form: str
) -> None:
    """8 pictures of 512 x 512 with the VAE of Stable Diffusion 3; on the CPU a small one."""
    on_gpu = device.startswith("cuda")
    if form == "bf16 compiled" and not on_gpu:
        pytest.skip("the compiler of the CPU takes a minute for a VAE")
    size, side = (MEDIUM, 64) if on_gpu else (SMALL, 8)
    pipeline = make(vae_dtype=form[:4], decode_rows=ROWS)
    dtype = torch.float32 if form == "fp32" else torch.bfloat16

    def load() -> Any:
        with seeded(0):
            made = vae(size).to(device, dtype).eval()
        if form == "bf16 compiled":
            compile_blocks(made.decoder, DECODER_BLOCKS, Compilations("vae"))
        return made

    pipeline._vae.load = load
    rows = latents(device, side)
    times = []
    for _ in range(4):
        start = perf_counter()
        media = pipeline.decode(rows)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    record("decode of 8 pictures", **{f"{form} s": round(median(times[1:]), 4)})
    assert all(bool(one.pixels.isfinite().all()) for one in media)
