"""Counts of denoising steps: losses and the recipe check must come to the same number."""

from __future__ import annotations

from drl.config.steps import share_of_steps

__all__ = ["share_of_steps"]
