"""Tiny Stable Diffusion 3 pipelines made from nothing: no model hub, no download.

``build_random`` writes a pipeline for tests (random weights, built in well under a second);
``build_glyphs`` writes the untrained pipeline of the glyphs base model. Both use the real
diffusers and transformers classes, so whatever loads Stable Diffusion 3 loads these folders.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

LATENT_CHANNELS = 4
PATCH = 2
TEXT_STD = 0.7


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny pipeline; each of the two CLIP encoders is half as wide as the text."""

    text_width: int
    text_heads: int
    text_layers: int
    tokens: int
    words: tuple[str, ...]
    vae_channels: tuple[int, ...]
    vae_groups: int
    layers: int
    heads: int
    head_width: int
    largest_latent: int

    @property
    def clip_width(self) -> int:
        """Features of one CLIP encoder."""
        return self.text_width // 2


RANDOM = Shape(
    text_width=32,
    text_heads=2,
    text_layers=1,
    tokens=16,
    words=(),
    vae_channels=(8, 8),
    vae_groups=4,
    layers=2,
    heads=2,
    head_width=16,
    largest_latent=32,
)
GLYPHS = Shape(
    text_width=96,
    text_heads=4,
    text_layers=1,
    tokens=10,
    words=("sign",),
    vae_channels=(16, 32),
    vae_groups=8,
    layers=3,
    heads=3,
    head_width=32,
    largest_latent=48,
)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block from ``seed``; the global random state is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def clip_tokenizer(tokens: int, words: Sequence[str] = ()) -> CLIPTokenizer:
    """A lower-casing character tokenizer that pads to ``tokens``; each of ``words`` is one token."""
    characters = string.ascii_lowercase + string.digits + string.punctuation
    names = [*characters, *(f"{character}</w>" for character in characters)]
    names += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=tokens)
    tokenizer.add_tokens(list(words))
    return tokenizer


def t5_tokenizer(tokens: int, words: Sequence[str] = ()) -> T5Tokenizer:
    """A character tokenizer that keeps case; each of ``words`` is one token at a word's start."""
    space = "\u2581"
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (space, -2.0)]
    scores += [(space + word, -1.0) for word in words]
    characters = string.ascii_letters + string.digits + string.punctuation
    scores += [(character, -3.0) for character in characters]
    return T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=tokens)


def clip_encoder(shape: Shape, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A CLIP text encoder for ``tokenizer`` with random weights from the global random state."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.clip_width,
        intermediate_size=2 * shape.clip_width,
        projection_dim=shape.clip_width,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=shape.text_heads,
        max_position_embeddings=shape.tokens,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config).eval()


def t5_encoder(shape: Shape, tokenizer: T5Tokenizer) -> T5EncoderModel:
    """A T5 encoder for ``tokenizer`` with random weights from the global random state."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=shape.text_width,
        d_kv=shape.text_width // shape.text_heads,
        d_ff=2 * shape.text_width,
        num_layers=shape.text_layers,
        num_heads=shape.text_heads,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()


def vae(shape: Shape) -> AutoencoderKL:
    """An autoencoder that halves height and width once per block after the first."""
    blocks = len(shape.vae_channels)
    return AutoencoderKL(
        block_out_channels=shape.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=shape.vae_groups,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    ).eval()


def transformer(shape: Shape) -> SD3Transformer2DModel:
    """An untrained diffusion transformer with weights from the global random state."""
    return SD3Transformer2DModel(
        sample_size=shape.largest_latent,
        patch_size=PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=shape.layers,
        num_attention_heads=shape.heads,
        attention_head_dim=shape.head_width,
        joint_attention_dim=shape.text_width,
        caption_projection_dim=shape.heads * shape.head_width,
        pooled_projection_dim=2 * shape.clip_width,
        pos_embed_max_size=shape.largest_latent // PATCH,
        qk_norm="rms_norm",
    ).eval()


def pipeline(shape: Shape, *, seed: int) -> StableDiffusion3Pipeline:
    """A complete pipeline of ``shape``; the same seed gives the same weights, bit for bit."""
    clip_tokens = clip_tokenizer(shape.tokens, shape.words)
    t5_tokens = t5_tokenizer(shape.tokens, shape.words)
    with seeded(seed):
        return StableDiffusion3Pipeline(
            transformer=transformer(shape),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae(shape),
            text_encoder=clip_encoder(shape, clip_tokens),
            tokenizer=clip_tokens,
            text_encoder_2=clip_encoder(shape, clip_tokens),
            tokenizer_2=clip_tokenizer(shape.tokens, shape.words),
            text_encoder_3=t5_encoder(shape, t5_tokens),
            tokenizer_3=t5_tokens,
        )


@torch.no_grad()
def tell_letters_apart(encoder: CLIPTextModelWithProjection, tokenizer: CLIPTokenizer) -> None:
    """Give a frozen random CLIP encoder outputs that say which letter stands at which place.

    Stable Diffusion 3 takes the hidden states before the last layer; with one layer these are
    token embedding plus position embedding. Both get the same size here, for a total variance of
    about 1, and a letter at a word's end looks like the same letter elsewhere.
    """
    embeddings = encoder.text_model.embeddings
    tokens = embeddings.token_embedding.weight
    tokens.normal_(std=TEXT_STD)
    embeddings.position_embedding.weight.normal_(std=TEXT_STD)
    for letter in string.ascii_lowercase:
        inner, last = tokenizer.convert_tokens_to_ids([letter, f"{letter}</w>"])
        tokens[last] = tokens[inner]


def glyph_pipeline(*, seed: int) -> StableDiffusion3Pipeline:
    """The untrained pipeline of the glyphs base model: VAE and transformer still know nothing."""
    glyphs = pipeline(GLYPHS, seed=seed)
    with seeded(seed + 1):
        tell_letters_apart(glyphs.text_encoder, glyphs.tokenizer)
        tell_letters_apart(glyphs.text_encoder_2, glyphs.tokenizer_2)
    return glyphs


def build_random(directory: str | Path, *, seed: int) -> None:
    """Write a very small pipeline with random weights to ``directory``, for tests."""
    pipeline(RANDOM, seed=seed).save_pretrained(directory)


def build_glyphs(directory: str | Path, *, seed: int) -> None:
    """Write the glyph pipeline to ``directory`` with nothing trained.

    ``python -m drl_family_sd3.glyphs build`` writes the same with a trained VAE.
    """
    glyph_pipeline(seed=seed).save_pretrained(directory)
