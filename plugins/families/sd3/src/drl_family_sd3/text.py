"""Prompt to embeddings, as diffusers' Stable Diffusion 3 pipeline makes them for one prompt.

Two CLIP encoders side by side in the feature axis, padded to T5's width, followed by T5's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from drl.api import BadInput, ConditionRecord
from drl.mathematics.transfer import moved
from drl_family_sd3.checkpoint import has_part, load_part, read_config, read_index
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.forward import POOLED, TEXT
from drl_family_sd3.residence import Resident

T5_TOKENS = 256


@dataclass(frozen=True)
class Clip:
    """One CLIP encoder and its tokenizer."""

    tokenizer: Any
    encoder: Resident[Any]

    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last but one hidden state ``(1, length, D)`` and the pooled output ``(1, D)``."""
        output = self.encoder.get()(ids, output_hidden_states=True)
        return output.hidden_states[-2], output[0]


@dataclass(frozen=True)
class T5:
    """The T5 encoder and its tokenizer; without weights its tokens are zeros, as in diffusers."""

    tokenizer: Any
    encoder: Resident[Any] | None
    width: int
    length: int

    def encode(self, prompt: str, device: str) -> Tensor:
        """Return ``(1, length, width)``."""
        if self.encoder is None:
            return torch.zeros(1, self.length, self.width, device=device)
        ids = moved(token_ids(self.tokenizer, prompt, self.length), torch.device(device))
        embeddings: Tensor = self.encoder.get()(ids)[0]
        return embeddings


@dataclass(frozen=True)
class TextEncoders:
    """The three encoders; their weights are read at the first prompt."""

    clips: tuple[Clip, Clip]
    t5: T5
    device: str

    @torch.no_grad()
    def compute(self, prompt: str) -> ConditionRecord:
        """Encode one prompt alone: float32 on the encoders' device, without batch axis."""
        length = self.clips[0].tokenizer.model_max_length  # diffusers pads both to the first one's
        device = torch.device(self.device)
        ids = [moved(token_ids(c.tokenizer, prompt, length), device) for c in self.clips]
        (hidden, pooled), (hidden_2, pooled_2) = map(Clip.encode, self.clips, ids)
        t5 = self.t5.encode(prompt, self.device).to(hidden)
        clip = torch.cat([hidden, hidden_2], dim=-1)
        clip = pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        text = torch.cat([clip, t5], dim=-2)[0]
        pooled = torch.cat([pooled, pooled_2], dim=-1)[0]
        return ConditionRecord(tensors={TEXT: text.float(), POOLED: pooled.float()})

    def release(self) -> None:
        """Move the weights to the CPU until the next prompt."""
        for part in self._parts():
            part.release()

    def drop(self) -> None:
        """Forget the weights until the next prompt."""
        for part in self._parts():
            part.drop()

    def _parts(self) -> list[Resident[Any]]:
        parts = [clip.encoder for clip in self.clips]
        return parts if self.t5.encoder is None else [*parts, self.t5.encoder]


def token_ids(tokenizer: Any, prompt: str, length: int) -> Tensor:
    """Return ``(1, length)`` token ids, padded or cut."""
    inputs = tokenizer(
        [prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    ids: Tensor = inputs.input_ids
    return ids


def check_text_encoders(checkpoint: str) -> None:
    """Raise BadInput for a pipeline without one of its CLIP encoders; loads nothing."""
    index = read_index(checkpoint)
    for part in ("text_encoder", "text_encoder_2"):
        if not has_part(index, part):
            raise BadInput(
                f"model.checkpoint: {checkpoint} has no {part}; only text_encoder_3 (T5) may miss"
            )


def open_text_encoders(checkpoint: str, options: Sd3Options, device: str) -> TextEncoders:
    """Read the tokenizers; a pipeline without T5 is fine."""
    clips = tuple(
        Clip(_tokenizer(checkpoint, f"tokenizer{end}"), _encoder(checkpoint, end, options, device))
        for end in ("", "_2")
    )
    return TextEncoders((clips[0], clips[1]), _open_t5(checkpoint, options, device), device)


def _open_t5(checkpoint: str, options: Sd3Options, device: str) -> T5:
    width = int(read_config(checkpoint, "transformer")["joint_attention_dim"])
    if not has_part(read_index(checkpoint), "text_encoder_3"):
        return T5(None, None, width, options.t5_tokens or T5_TOKENS)
    tokenizer = _tokenizer(checkpoint, "tokenizer_3")
    length = options.t5_tokens or min(T5_TOKENS, tokenizer.model_max_length)
    return T5(tokenizer, _encoder(checkpoint, "_3", options, device), width, length)


def _encoder(checkpoint: str, end: str, options: Sd3Options, device: str) -> Resident[Any]:
    def load() -> Any:
        part = f"text_encoder{end}"
        return load_part(checkpoint, part, dtype=options.text_dtype, device=device)

    return Resident(load, device)


def _tokenizer(checkpoint: str, part: str) -> Any:
    # The tokenizer's own config decides its class, as in the engines: model_index.json may name
    # another one that splits some texts differently.
    return AutoTokenizer.from_pretrained(checkpoint, subfolder=part)
