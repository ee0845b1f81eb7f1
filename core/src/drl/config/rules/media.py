"""Rules about the media of supervised runs: what is encoded, and which of its options have a use."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.config.places import is_file
from drl.errors import Problem

UNUSED = {
    "data.sft_encoder_checkpoint": None,
    "data.sft_frame_stride": 1,
    "data.sft_cache": None,
    "data.sft_workers": 0,
}
"""Options of encoding, and the values that ask for nothing."""


def encoding_of_rollouts(draft: Draft) -> Iterator[Problem]:
    """A run that trains on rollouts encodes no media."""
    if draft.get("train.train_only"):
        return
    for key, unset in UNUSED.items():
        if draft.get(key) != unset:
            yield Problem(
                key, "is not used: without train.train_only no media are encoded", "warning"
            )


def stride_of_one_frame(draft: Draft) -> Iterator[Problem]:
    """A stride needs a second frame."""
    stride, frames = draft.get("data.sft_frame_stride"), draft.get("sampling.num_frames")
    if draft.get("train.train_only") and stride > 1 and frames == 1:
        yield Problem(
            "data.sft_frame_stride", "is not used: sampling.num_frames is 1, one frame", "warning"
        )


def cache_folder(draft: Draft) -> Iterator[Problem]:
    """The cache is a folder."""
    path = draft.get("data.sft_cache")
    if path is not None and is_file(path):
        yield Problem("data.sft_cache", f"{path} is a file; give a folder")


MEDIA_RULES = (encoding_of_rollouts, stride_of_one_frame, cache_folder)
