"""What a person reads about the trainer before a run starts. Imports no torch."""

from __future__ import annotations

from typing import Any


def trainer_lines(recipe: Any) -> list[str]:
    """Return a line about the optimizer, and one about the moving average where there is one."""
    lines = [optimizer_line(recipe)]
    if recipe.ema.enabled:
        lines.append(ema_line(recipe))
    return lines


def optimizer_line(recipe: Any) -> str:
    """Return which optimizer runs, by which implementation, at which rate, in which precision."""
    options = recipe.optimizer
    if options.name == "adam":
        on_gpu = recipe.cluster.device.startswith("cuda") and not recipe.train.cpu_offload
        name = f"AdamW ({'fused' if on_gpu else 'foreach'})"
    else:
        name = f"SGD with momentum {options.momentum:g}"
    style = "" if options.lr_decay_style == "constant" else f", {options.lr_decay_style}"
    scaler = ", dynamic loss scale" if recipe.train.forward_dtype == "fp16" else ""
    return f"{name}, learning rate {options.lr:g}{style}, weights in {recipe.train.master_dtype}{scaler}"


def ema_line(recipe: Any) -> str:
    """Return what the moving average is used for: which weights make the pictures that are shown."""
    uses = []
    if recipe.ema.rollout_policy == "ema":
        uses.append("rollouts and evaluations use it, adapter/ holds the trained weights")
    if recipe.algorithm.ref_mode == "ema":
        uses.append("it is the reference")
    return f"moving average of the weights: {'; '.join(uses)}"
