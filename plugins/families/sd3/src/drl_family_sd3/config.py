"""Options of the family ``sd3``, the recipe table ``[model.sd3]``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class Sd3Options(Options):
    """How Stable Diffusion 3 encodes text and decodes pictures."""

    t5_tokens: int | None = Field(
        None,
        ge=1,
        description="Length that prompts are padded to for T5; unset: 256, or what its tokenizer allows "
        "if that is less.",
    )
    text_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Precision of the three text encoders."
    )
    text_encoders: Literal["resident", "released"] = Field(
        "resident",
        description="resident: the text encoders stay on the device. released: the prompts of the run are "
        "encoded at its start and kept on the CPU, and the encoders' memory is given back; a prompt that was "
        "not known loads them once more.",
    )
    prompt_cache: int = Field(
        512,
        ge=1,
        description="How many prompts keep their embeddings on the device (5.5 MB each with T5 of 4096 "
        "features); with released encoders, how many are kept on the CPU beside the known ones.",
    )
    vae_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Precision of the VAE. bf16 decodes faster in half the memory, a little less exactly; in "
        "fp16 this VAE overflows.",
    )
    compile_vae: bool = Field(
        False,
        description="Compile the blocks of the VAE's decoder with torch.compile: half a minute once, then a "
        "faster decode.",
    )
    decode_rows: int = Field(
        8,
        ge=1,
        description="Pictures decoded at once; every decode runs at this count, padded, so that a "
        "picture does not depend on its neighbours. Lower it when decoding runs out of memory.",
    )
    tiled_decode: bool = Field(
        False,
        description="Decode pictures larger than the VAE's sample_size in overlapping tiles, as the "
        "sglang server does: less memory, but not the same picture as decoding it whole.",
    )


class GlyphOptions(Options):
    """Pictures of random strings, for supervised training."""

    count: int = Field(
        12_000, ge=1, description="Number of different pictures; an epoch shows each once."
    )
