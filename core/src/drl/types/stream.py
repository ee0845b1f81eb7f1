"""Names that every data module shares. ``Streams``: tensors by stream name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Streams = Mapping[str, Tensor]
else:
    Streams = Mapping

VISUAL = "visual"
"""Name of the image or video stream; a plain latent tensor is this stream."""
