"""From a built pipeline and trained weights to what is shipped: half precision, and prompt files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from drl.api import BadInput

from .words import dev_words, prompt_of, rl_words, test_words

PROMPT_FILES = {"train": rl_words, "dev": dev_words, "heldout": test_words}


def pack(pipeline: str | Path, weights: str | Path, target: str | Path) -> None:
    """Put trained transformer weights into a built pipeline and save it in float16.

    ``weights``: the ``model/transformer.safetensors`` of a supervised run. Raises BadInput when its
    tensors are not those of the pipeline's transformer.
    """
    made = StableDiffusion3Pipeline.from_pretrained(pipeline)
    problems = made.transformer.load_state_dict(load_file(weights), strict=False)
    if problems.missing_keys or problems.unexpected_keys:
        raise BadInput(
            f"{weights} does not fit the transformer of {pipeline}: missing "
            f"{problems.missing_keys[:3]}, unexpected {problems.unexpected_keys[:3]}; give the weights "
            "of a run that trained this pipeline"
        )
    made.to(torch.float16).save_pretrained(target)


def write_prompts(directory: str | Path) -> list[Path]:
    """Write ``train.jsonl``, ``dev.jsonl`` and ``heldout.jsonl``: one prompt per word."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, words in PROMPT_FILES.items():
        rows = [{"input": prompt_of(word), "metadata": {"target": word}} for word in words()]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.append(file)
    return written
