"""What encoding needs of a run, without a model: a family whose latents are block means, real data sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from drl.builtin.config_data import JsonlOptions
from drl.builtin.data_jsonl import JsonlSource
from drl.interfaces.family import Pipeline
from drl.observe.timing import Phases
from drl.options import Options
from drl.stages.records import Records
from drl.types import ConditionRecord, Context, Media, Sampling, Streams


class BlockMeans(Pipeline):
    """Latents are the mean of each 2 x 2 block of each frame plus a little noise; text is its length."""

    def __init__(self) -> None:
        self.media: list[Media] = []
        self.texts: list[str] = []

    def encode_text(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        self.texts += prompts
        return [
            ConditionRecord(
                tensors={"text": torch.tensor([float(len(text))])}, values={"words": text}
            )
            for text in prompts
        ]

    def encode_media(self, media: Media, generator: Generator) -> Streams:
        self.media.append(media)
        mean = torch.nn.functional.avg_pool2d(media.pixels.transpose(0, 1), 2)
        return {"visual": mean + 0.1 * torch.randn(mean.shape, generator=generator)}

    def sigmas(self, sampling: Sampling) -> Tensor:
        raise NotImplementedError

    def timesteps(self, sampling: Sampling) -> Tensor:
        raise NotImplementedError

    def initial(self, sampling: Sampling, generator: Generator) -> Streams:
        raise NotImplementedError

    def decode(self, streams: Streams) -> list[Media]:
        raise NotImplementedError


class Tokens(Options):
    """Options of the family."""

    tokens: int = 8


@dataclass
class Told:
    """What a run told its loggers."""

    events: list[str] = field(default_factory=list)
    phases: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass
class Settings:
    """What a test changes."""

    batch: int = 2
    num_rollout: int = 4
    side: int = 4
    frames: int = 1
    stride: int = 1
    on_broken_row: str = "refuse"
    cache: Path | None = None
    checkpoint: str = "base"
    encoders: str | None = None
    tokens: int = 8
    version: str = "1.0"
    dtype: str = "fp32"
    seed: int = 0
    shuffle: bool = False


def encoding_run(data: Path, settings: Settings | None = None) -> Any:
    """Return a run of one jsonl file; ``run.told`` has its events, ``run.asked`` the checkpoints it opened."""
    chosen = settings or Settings()
    section = SimpleNamespace(
        prompt_data=data,
        input_key="input",
        metadata_key="metadata",
        on_broken_row=chosen.on_broken_row,
        sft_cache=chosen.cache,
        sft_encoder_checkpoint=chosen.encoders,
        sft_frame_stride=chosen.stride,
        sft_workers=0,
        source="jsonl",
    )
    context = Context(seed=chosen.seed, section=section, dtype=chosen.dtype)
    told, pipeline, asked = Told(), BlockMeans(), []

    def open_pipeline(checkpoint: str, context: Context) -> Pipeline:
        asked.append(checkpoint)
        return pipeline

    return SimpleNamespace(
        recipe=SimpleNamespace(
            rollout=SimpleNamespace(batch_size=chosen.batch),
            data=section,
            sampling=SimpleNamespace(
                height=chosen.side, width=chosen.side, num_frames=chosen.frames
            ),
            train=SimpleNamespace(num_rollout=chosen.num_rollout),
            model=SimpleNamespace(
                family="blocks", checkpoint=chosen.checkpoint, components=("transformer",)
            ),
        ),
        family=SimpleNamespace(options=Tokens(tokens=chosen.tokens), pipeline=open_pipeline),
        catalog=SimpleNamespace(find=lambda kind, name: SimpleNamespace(version=chosen.version)),
        source=JsonlSource(JsonlOptions(shuffle=chosen.shuffle), context),
        counters=SimpleNamespace(next_group=0, images_seen=0),
        phases=Phases(),
        first_rollout=0,
        version=0,
        pipeline=pipeline,
        asked=asked,
        records=Records(),
        row={},
        told=told,
        event=told.events.append,
        progress=lambda phase, done, total: told.phases.append((phase, done, total)),
        stop=SimpleNamespace(asked=False, reason=""),
        context=context,
    )


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines; what is a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def image_rows(folder: Path, count: int, size: tuple[int, int] = (6, 4)) -> Path:
    """Write ``count`` noisy pictures and the jsonl file that names them."""
    generator = np.random.default_rng(0)
    (folder / "media").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        levels = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(levels).save(folder / "media" / f"{number}.png")
        rows.append({"input": f"picture {number}", "metadata": {"image": f"media/{number}.png"}})
    return write_rows(folder / "data.jsonl", rows)
