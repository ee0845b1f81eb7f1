"""Which columns of a data set hold text and media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drl.api import DataError
from drl_data_hf_datasets.config import HfDatasetOptions


@dataclass(frozen=True, slots=True)
class Columns:
    """``media``: the column of the media; ``kind``: "image" or "video"."""

    media: str
    kind: str

    def undecoded(self, rows: Any) -> Any:
        """Return rows whose media are bytes or a path, not decoded."""
        from datasets import Image, Video

        feature = {"image": Image, "video": Video}[self.kind]
        if isinstance(rows.features[self.media], feature):
            rows = rows.cast_column(self.media, feature(decode=False))
        return rows.select_columns([self.media])


def choose_columns(features: Mapping[str, Any], options: HfDatasetOptions) -> Columns:
    """Return the columns that a recipe names, or the only ones of their type; DataError otherwise."""
    from datasets import Image, Value, Video

    text = known(features, options.text_column, "text_column")
    if not (isinstance(features[text], Value) and "string" in features[text].dtype):
        raise DataError(f"data.hf_dataset.text_column: column {text!r} does not hold text")
    named = {"image": options.image_column, "video": options.video_column}
    chosen = {kind: column for kind, column in named.items() if column is not None}
    if len(chosen) > 1:
        raise DataError(
            "data.hf_dataset: image_column and video_column are both given; keep one of them"
        )
    for kind, column in chosen.items():
        known(features, column, f"{kind}_column")
        fits = (Value, {"image": Image, "video": Video}[kind])
        if not isinstance(features[column], fits):
            raise DataError(
                f"data.hf_dataset.{kind}_column: column {column!r} holds no {kind} and no name of one"
            )
        return Columns(column, kind)
    found = [
        Columns(column, kind)
        for kind, feature in (("image", Image), ("video", Video))
        for column in features
        if isinstance(features[column], feature)
    ]
    if len(found) != 1:
        have = ", ".join(f"{one.media} ({one.kind})" for one in found) or "none"
        raise DataError(
            "data.hf_dataset: set image_column or video_column; columns of images or videos: "
            f"{have}; all columns: {', '.join(features)}"
        )
    return found[0]


def known(features: Mapping[str, Any], column: str, option: str) -> str:
    """Return a column; DataError when the data set has none of that name."""
    if column not in features:
        raise DataError(
            f"data.hf_dataset.{option}: there is no column {column!r}; it has: {', '.join(features)}"
        )
    return column
