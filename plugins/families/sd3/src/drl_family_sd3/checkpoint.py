"""Reading a Stable Diffusion 3 checkpoint: a diffusers folder, or a hub id.

Only the classes of ``CLASSES`` are loaded; a ``model_index.json`` that names others is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
)
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from torch import nn
from transformers import CLIPTextModelWithProjection, T5EncoderModel
from transformers.utils import logging

from drl.api import BadInput, WeightSource
from drl.mathematics.feeding import DTYPES

CLASSES: Mapping[str, type[Any]] = {
    "transformer": SD3Transformer2DModel,
    "vae": AutoencoderKL,
    "scheduler": FlowMatchEulerDiscreteScheduler,
    "text_encoder": CLIPTextModelWithProjection,
    "text_encoder_2": CLIPTextModelWithProjection,
    "text_encoder_3": T5EncoderModel,
}
LOADED: Mapping[str, Mapping[str, Any]] = {"text_encoder_3": {"attn_implementation": "eager"}}
"""T5's attention as a matrix product and a softmax: that is what the sglang server computes, bit for bit.

The fused kernel that transformers would take moves an embedding by 8e-6, and guidance multiplies that.
"""
HUB_REASONS: Mapping[type[Exception], str] = {
    GatedRepoError: "the hub gives it only to those who accepted its licence: accept it on the page of the "
    "model, then 'hf auth login' or HF_TOKEN",
    RepositoryNotFoundError: "the hub has no such repository, or does not show it to this account "
    "('hf auth login', HF_TOKEN)",
    LocalEntryNotFoundError: "the hub cannot be reached, and the cache of this machine does not have it",
}
"""What the hub's errors mean; of two that fit the first counts."""


def read_index(checkpoint: str) -> Mapping[str, Any]:
    """Return ``model_index.json``; BadInput when the checkpoint is no Stable Diffusion 3 pipeline."""
    folder = Path(checkpoint)
    if folder.exists() and not (folder / "model_index.json").is_file():
        raise BadInput(
            f"model.checkpoint: {checkpoint} has no model_index.json; give the folder of a whole "
            "diffusers pipeline, or a hub id"
        )
    with readable(checkpoint, "model_index.json"):
        index: Mapping[str, Any] = DiffusionPipeline.load_config(checkpoint)
    for part, expected in CLASSES.items():
        named = index.get(part, (None, None))[1]
        if named not in (None, expected.__name__):
            raise BadInput(
                f"model.checkpoint: {checkpoint} has {named} as {part}; family 'sd3' needs "
                f"{expected.__name__}"
            )
    return index


def has_part(index: Mapping[str, Any], part: str) -> bool:
    """Say whether the pipeline comes with this part."""
    return index.get(part, (None, None))[1] is not None


def read_config(checkpoint: str, part: str) -> Mapping[str, Any]:
    """Return ``config.json`` of the transformer, the VAE or the scheduler."""
    with readable(checkpoint, f"the config of {part}"):
        config: Mapping[str, Any] = CLASSES[part].load_config(checkpoint, subfolder=part)
    return config


@contextmanager
def readable(checkpoint: str, what: str) -> Iterator[None]:
    """Turn a file that cannot be read or fetched into BadInput."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"model.checkpoint: cannot read {what} of {checkpoint}: {reason_of(error)}; give the folder of "
            "a diffusers pipeline, or a hub id that this machine can download"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return why something could not be fetched; the libraries call whatever failed a wrong name."""
    chain: list[BaseException] = []
    last: BaseException | None = error
    while last is not None:
        chain.append(last)
        last = last.__cause__ or last.__context__
    for kind, reason in HUB_REASONS.items():
        if any(isinstance(one, kind) for one in chain):
            return reason
    return str(error).partition("\n")[0]


def load_part(checkpoint: str, part: str, *, dtype: str, device: str) -> Any:
    """Load one model in evaluation mode; the global random state is left as it was.

    BadInput when the files lack a tensor of the model: the libraries would fill in random numbers.
    """
    with torch.random.fork_rng(devices=[]), quiet_loading(), readable(checkpoint, part):
        model, report = CLASSES[part].from_pretrained(
            checkpoint,
            subfolder=part,
            torch_dtype=DTYPES[dtype],
            output_loading_info=True,
            **LOADED.get(part, {}),
        )
    lacking = sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])])
    if lacking:
        raise BadInput(
            f"model.checkpoint: the weights of {part} in {checkpoint} lack {len(lacking)} tensors or "
            f"have other shapes: {', '.join(lacking[:5])}; they belong to another config.json"
        )
    return model.to(device).eval()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep the progress bars of transformers off the terminal: the parts here load in no time."""
    showed = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if showed:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def build_transformer(source: WeightSource) -> nn.Module:
    """Return the transformer in ``source.dtype``; its position table stays float32.

    Engines keep that table in float32 too: rounding it to bf16 moves a prediction by 0.01 to 0.08.
    """
    if source.meta:
        with torch.device("meta"):
            config = read_config(source.checkpoint, "transformer")
            blank: nn.Module = CLASSES["transformer"].from_config(config)
        return blank
    model: Any = load_part(source.checkpoint, "transformer", dtype="fp32", device="cpu")
    table = model.pos_embed.pos_embed
    if source.dtype != "fp32":
        nn.Module.to(
            model, DTYPES[source.dtype]
        )  # diffusers' own warns of the table that is put back
        model.pos_embed.pos_embed = table
    moved: nn.Module = model.to(source.device)
    return moved
