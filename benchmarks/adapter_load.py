"""What an adapter of 100 MB costs: reading each format, loading it into the model, showing, merging.

``python benchmarks/adapter_load.py`` prints medians in seconds; files were just written, so they come
from the page cache. ``drl adapters show`` is timed as a process of its own, start of Python included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from common import SCALES, Row, arguments, report, sync, targets, transformer
from torch import nn

from drl.formats.layout import module_layout
from drl.formats.read import read_adapter
from drl.formats.write import write_adapter
from drl.lora import (
    LoraConfig,
    adapters,
    inject,
    load_peft,
    merge,
    merged_state,
    save_peft,
    unmerge,
)
from drl.lora.peft_directory import DIFFUSERS_FILE

BYTES = {"medium": 100_000_000, "small": 1_000_000}
"""How large the adapter file should be; the rank follows."""


def adapted(options: argparse.Namespace) -> tuple[nn.Module, LoraConfig]:
    """Return the bf16 model with float32 adapters of the wanted size."""
    model = transformer(SCALES[options.size], options.device, torch.bfloat16)
    trial = LoraConfig(rank=1, alpha=2, target_modules=targets())
    meta = transformer(SCALES[options.size], "meta", torch.bfloat16)
    inject(meta, trial, generator=torch.Generator())
    per_rank = sum(4 * (pair.A.numel() + pair.B.numel()) for pair in adapters(meta).values())
    rank = max(1, round(BYTES[options.size] / per_rank))
    config = LoraConfig(rank=rank, alpha=2 * rank, target_modules=targets())
    generator = torch.Generator().manual_seed(2)
    inject(model, config, generator=generator)
    for pair in adapters(model).values():
        drawn = 0.02 * torch.randn(pair.B.shape, generator=generator)
        with torch.no_grad():
            pair.B.copy_(drawn)
    return model, config


def timed(work: Callable[[], object], options: argparse.Namespace) -> float:
    """Return the median seconds of a call, work on the device included."""
    times = []
    for _ in range(options.repeats):
        sync(options.device)
        began = time.perf_counter()
        work()
        sync(options.device)
        times.append(time.perf_counter() - began)
    return median(times)


def show(path: Path) -> None:
    """Run ``drl adapters show``."""
    command = [sys.executable, "-m", "drl_cli", "adapters", "show", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def drain(model: nn.Module) -> None:
    """Merge every weight, one at a time, as a push does."""
    for _ in merged_state(model):
        pass


def merge_and_back(model: nn.Module) -> None:
    """Merge in place, and restore the base."""
    merge(model)
    unmerge(model)


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Write the adapter in each format, then time everything."""
    model, config = adapted(options)
    layout = {"transformer": module_layout(model)}
    peft = folder / "adapter"
    save_peft(model, peft, config, base_model=None)
    adapter = read_adapter(peft, component="transformer")
    files = {
        "PEFT folder": peft,
        "diffusers file": peft / DIFFUSERS_FILE,
        "kohya file": write_adapter(adapter, "kohya", folder / "kohya.safetensors", layout),
    }
    rows = [
        {
            "what": name,
            "MB": size_of(path, peft) / 1e6,
            "read s": timed(lambda p=path: read_adapter(p, layout=layout), options),  # type: ignore[misc]
            "show s": timed(lambda p=path: show(p), options),  # type: ignore[misc]
        }
        for name, path in files.items()
    ]
    rows.append(
        {"what": "load into the model", "seconds": timed(lambda: load_peft(model, peft), options)}
    )
    rows.append({"what": "merge, streaming", "seconds": timed(lambda: drain(model), options)})
    rows.append(
        {
            "what": "merge and unmerge in place",
            "seconds": timed(lambda: merge_and_back(model), options),
        }
    )
    return [row | {"rank": config.rank} for row in rows]


def size_of(path: Path, peft: Path) -> int:
    """Return the bytes that a reader of this format reads; the folder holds the diffusers file too."""
    read = [path] if path.is_file() else [p for p in peft.iterdir() if p.name != DIFFUSERS_FILE]
    return sum(file.stat().st_size for file in read)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        report("adapter_load", options, measure(options, Path(folder)))


if __name__ == "__main__":
    main()
