"""Shared by the benchmarks: the transformer and its inputs, timing in rounds, tables, result files."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.utils import logging
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from gpu.pipelines import CLIP_TOKENS, MEDIUM, SMALL, T5_TOKENS  # noqa: E402

from drl_family_sd3.family import LORA_TARGETS  # noqa: E402
from drl_family_sd3.tiny import seeded  # noqa: E402

logging.set_verbosity_error()  # the cast of a whole model to bf16 is meant

RANK, ALPHA = 32, 64
GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """One model size: transformer config, latent side, text tokens, rows of a batch, largest rank."""

    transformer: Mapping[str, Any]
    side: int
    tokens: int
    batch: int
    rank: int


SCALES = {
    "medium": Scale(MEDIUM.transformer, 64, CLIP_TOKENS + T5_TOKENS, 8, RANK),
    "small": Scale(SMALL.transformer, 8, 12, 2, 4),
}
"""``medium``: Stable Diffusion 3.5 Medium at 512 x 512, 2.2 billion parameters. ``small``: seconds on a CPU."""


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", choices=SCALES, default="medium" if cuda else "small")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, help="folder for figures (JSON) and details")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds; medians are shown")
    parser.add_argument("--warmup", type=int, default=3, help="rounds that are not timed")
    return parser


def transformer(scale: Scale, device: str, dtype: torch.dtype, *, seed: int = 0) -> nn.Module:
    """Return a transformer of random weights, made on the device, the same for the same seed.

    Its position table stays float32, as the family loads it.
    """
    with seeded(seed), torch.device(device):
        module = SD3Transformer2DModel(
            **scale.transformer, patch_size=2, in_channels=16, out_channels=16, qk_norm="rms_norm"
        )
    table = module.pos_embed.pos_embed
    module.to(dtype)
    module.pos_embed.pos_embed = table
    result: nn.Module = module
    return result


def inputs(scale: Scale, device: str, dtype: torch.dtype, *, seed: int = 1) -> Row:
    """Return the keyword arguments of one forward: random latents, text embeddings, timesteps."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = scale.batch
    shapes = {
        "hidden_states": (rows, 16, scale.side, scale.side),
        "encoder_hidden_states": (rows, scale.tokens, scale.transformer["joint_attention_dim"]),
        "pooled_projections": (rows, scale.transformer["pooled_projection_dim"]),
    }
    made: Row = {
        name: torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for name, shape in shapes.items()
    }
    timestep = 1000 * torch.rand(rows, generator=generator, device=device)
    return made | {"timestep": timestep, "return_dict": False}


def targets() -> tuple[str, ...]:
    """Return the family's adapted layers: the joint attention's projections."""
    return LORA_TARGETS


def sync(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def free() -> None:
    """Give unused memory of the device back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_gib(device: str) -> float | None:
    """Return the most memory that was held since the last reset; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    return round(torch.cuda.max_memory_allocated() / GIB, 2)


def reset_peak(device: str) -> None:
    """Start to count the most memory anew."""
    free()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def apart_from_eager(module: nn.Module, given: Row) -> Row:
    """Return how far outputs of compiled blocks are from those of eager ones, and the outputs' deviation."""
    # with gradients, as training computes
    compiled = module(**given)[0].detach().float()
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        eager = module(**given)[0].float()
    apart = (compiled - eager).abs()
    return {
        "apart mean": apart.mean().item(),
        "apart max": apart.max().item(),
        "deviation": eager.std().item(),
    }


def bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return what a model and the state of its optimizer hold."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def peak_of(work: Callable[[], object], device: str, others: int) -> float | None:
    """Return the most GiB that are held while a work runs, without ``others``: bytes of works beside it."""
    reset_peak(device)
    work()
    peak = peak_gib(device)
    return None if peak is None else round(peak - others / GIB, 2)


def fits(work: Callable[[], object], name: str) -> bool:
    """Try a work; say so when it does not fit into the device's memory, and give back what it took."""
    try:
        work()
    except torch.OutOfMemoryError as error:
        print(f"{name} does not fit: {error}", file=sys.stderr)
        fitted = False
    else:
        fitted = True
    free()
    return fitted


def milliseconds(work: Callable[[], object], device: str) -> float:
    """Time one call: by CUDA events on a GPU, so that launches ahead of it do not count."""
    if not device.startswith("cuda"):
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def wall_milliseconds(work: Callable[[], object], device: str) -> float:
    """Time one call by the wall clock, from an idle device until it is idle again: what a user waits for."""
    sync(device)
    began = time.perf_counter()
    work()
    sync(device)
    return (time.perf_counter() - began) * 1e3


def in_rounds(
    works: Mapping[str, Callable[[], object]],
    device: str,
    *,
    repeats: int,
    warmup: int,
    timed: Callable[[Callable[[], object], str], float] = milliseconds,
) -> dict[str, float]:
    """Return the median milliseconds of each work; a round runs every one once.

    Rounds, so that a clock that drifts during the run does not favour one of them.
    """
    for _ in range(warmup):
        for work in works.values():
            work()
    sync(device)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(timed(work, device))
    return {name: median(values) for name, values in times.items()}


def mean_square(output: Sequence[Tensor]) -> Tensor:
    """Return a scalar whose gradient reaches every row of a prediction."""
    return output[0].float().pow(2).mean()


def facts(device: str) -> Row:
    """Return what the figures were measured on."""
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
        "python": platform.python_version(),
    }


def table(rows: Sequence[Row], names: Sequence[str] | None = None) -> str:
    """Return rows as aligned columns: those named, or all in the order in which they first appear.

    A row without any of the columns behind the first is left out.
    """
    if names is None:
        names = list(dict.fromkeys(name for row in rows for name in row))
    filled = [row for row in rows if len(names) == 1 or any(name in row for name in names[1:])]
    cells = [list(names), *([shown(row.get(name)) for name in names] for row in filled)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def shown(value: Any) -> str:
    """Return a figure with three digits; an absent one as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def report(
    name: str,
    options: argparse.Namespace,
    rows: Sequence[Row],
    *,
    columns: Sequence[Sequence[str]] | None = None,
) -> None:
    """Print one table, or one per choice of columns; with ``--out``, write ``NAME.json`` too."""
    measured = facts(options.device)
    print(f"{name}: {options.size} on {measured['device']}, torch {measured['torch']}")
    tables: Sequence[Sequence[str] | None] = columns or [None]
    for chosen in tables:
        print(table(rows, chosen), flush=True)
    if options.out is not None:
        write(name, options, rows)


def write(name: str, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the figures, and what they were measured on, as ``NAME.json``."""
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts(options.device), "size": options.size, "rows": list(rows)}
    (options.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
