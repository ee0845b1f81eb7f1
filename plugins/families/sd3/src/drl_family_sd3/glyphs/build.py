"""Building the glyphs base model up to the point where its transformer can be pretrained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..tiny import glyph_pipeline
from .vae import STEPS, train_vae

Say = Callable[[str], None]


class Progress:
    """Says how far a loop is, at most every ``every`` seconds, with the time still needed."""

    def __init__(self, say: Say, *, every: float = 5.0) -> None:
        self._say = say
        self._every = every
        self._start = self._last = time.monotonic()

    def __call__(self, step: int, steps: int, loss: float) -> None:
        """Report ``step`` of ``steps`` done; the last step is always said."""
        now = time.monotonic()
        if step < steps and now - self._last < self._every:
            return
        self._last = now
        left = (now - self._start) / step * (steps - step)
        self._say(f"VAE step {step}/{steps}  loss {loss:.4f}  ETA {left:.0f} s")


def build(directory: str | Path, *, seed: int = 0, vae_steps: int = STEPS, say: Say) -> None:
    """Write a pipeline with a trained VAE, frozen text encoders and an untrained transformer.

    The folder is a diffusers pipeline in float32 (about 11 MB); it overwrites files of an earlier
    build in ``directory``.
    """
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(
            f"cannot build the glyphs pipeline: {target} is a file. Name a directory."
        )
    pipeline = glyph_pipeline(seed=seed)
    say(f"Training the VAE: {vae_steps} steps.")
    train_vae(pipeline.vae, seed=seed, steps=vae_steps, report=Progress(say))
    pipeline.save_pretrained(target)
    say(f"Wrote {target}: the transformer is untrained; train it on rendered strings.")
