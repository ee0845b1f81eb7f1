"""Samples with pictures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drl.types import Media, Prompt, Sample


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    def make(
        row: int = 0,
        text: str = 'sign "WIND"',
        *,
        seed: int = 42,
        reward: float | None = 0.5,
        pixels: torch.Tensor | None = None,
        member: int = 0,
    ) -> Sample:
        shown = torch.full((3, 1, 16, 48), 0.25) if pixels is None else pixels
        return Sample(
            index=row * 10 + member,
            group_index=row,
            member=member,
            prompt=Prompt(row=row, text=text),
            seed=seed,
            reward=reward,
            media=Media(pixels=shown),
        )

    return make
