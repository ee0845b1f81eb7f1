"""What adapters cost: forward, and forward with backward, against the base model, eager and compiled.

``python benchmarks/lora_forward.py`` prints milliseconds and the ratio to the base model in the same
arithmetic. The base's backward is the gradient of the latents, the adapters' that of the adapters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from common import (
    ALPHA,
    RANK,
    SCALES,
    Row,
    Scale,
    arguments,
    free,
    in_rounds,
    inputs,
    mean_square,
    report,
    sync,
    targets,
    transformer,
)
from torch import nn

from drl.lora import LoraConfig, inject


@dataclass(frozen=True)
class Case:
    """A model and its arithmetic; ``against`` names the case that it is compared with."""

    name: str
    adapters: torch.dtype | None
    autocast: bool
    against: str


CASES = (
    Case("base, autocast", None, autocast=True, against="base, autocast"),
    Case("float32 adapters, autocast", torch.float32, autocast=True, against="base, autocast"),
    Case("base, bf16", None, autocast=False, against="base, bf16"),
    Case("bf16 adapters, bf16", torch.bfloat16, autocast=False, against="base, bf16"),
)
AUTOCAST = CASES[:2]
"""What a run does; compiling takes most of the time, so the others are compiled on request alone."""
GRAPHS = 64
"""The cases share the blocks' code, so each adds graphs to it; the default limit of 8 would end in eager."""


def model_of(case: Case, scale: Scale, device: str) -> nn.Module:
    """Return the bf16 base, with adapters that are not zero where the case has some."""
    model = transformer(scale, device, torch.bfloat16).requires_grad_(False)
    if case.adapters is not None:
        config = LoraConfig(rank=min(RANK, scale.rank), alpha=ALPHA, target_modules=targets())
        generator = torch.Generator().manual_seed(2)
        inject(model, config, generator=generator, dtype=case.adapters)
    return model


def works_of(
    case: Case, model: nn.Module, scale: Scale, device: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a forward, and a forward with backward."""
    given = inputs(scale, device, torch.bfloat16)
    kind = device.partition(":")[0]

    def precision() -> AbstractContextManager[object]:
        return torch.autocast(kind, torch.bfloat16) if case.autocast else nullcontext()

    def forward() -> object:
        with torch.no_grad(), precision():
            return model(**given)

    def both() -> None:
        latents = given["hidden_states"].detach().requires_grad_(case.adapters is None)
        with precision():
            loss = mean_square(model(**(given | {"hidden_states": latents})))
        loss.backward()
        model.zero_grad(set_to_none=True)

    return forward, both


def compiled(model: nn.Module) -> None:
    """Compile each block on its own, as a run does: one graph a kind of block, not one a model."""
    torch._dynamo.config.recompile_limit = GRAPHS
    for block in model.transformer_blocks:  # type: ignore[union-attr]
        block.compile()  # type: ignore[operator]


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield a row per case after each mode; every figure of a column comes from the same rounds."""
    scale = SCALES[options.size]
    models = {case.name: model_of(case, scale, options.device) for case in CASES}
    rows: dict[str, Row] = {case.name: {"case": case.name} for case in CASES}
    for mode in ("eager", "compiled") if not options.eager else ("eager",):
        cases = CASES if mode == "eager" or options.all else AUTOCAST
        if mode == "compiled":
            for case in cases:
                compiled(models[case.name])
        works = {c.name: works_of(c, models[c.name], scale, options.device) for c in cases}
        for index, what in enumerate(("forward", "forward+backward")):
            chosen = {name: pair[index] for name, pair in works.items()}
            if mode == "compiled":
                for name, work in chosen.items():
                    rows[name][f"{what} compile s"] = first_call(work, options.device)
            found = in_rounds(
                chosen, options.device, repeats=options.repeats, warmup=options.warmup
            )
            for case in cases:
                rows[case.name][f"{what} {mode} ms"] = found[case.name]
                rows[case.name][f"{what} {mode} ratio"] = found[case.name] / found[case.against]
        yield list(rows.values())  # compiling takes long: what is known is kept
    free()


def first_call(work: Callable[[], object], device: str) -> float:
    """Return the seconds of a call that compiles."""
    began = time.perf_counter()
    work()
    sync(device)
    return time.perf_counter() - began


def transposed(rows: list[Row]) -> list[Row]:
    """Turn a row per case into a line per figure, which fits a terminal."""
    figures = list(dict.fromkeys(name for row in rows for name in row if name != "case"))
    return [{"figure": name, **{row["case"]: row.get(name) for row in rows}} for name in figures]


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--eager", action="store_true", help="leave the compiled cases out")
    parser.add_argument("--all", action="store_true", help="compile the cases without autocast too")
    options = parser.parse_args()
    for rows in measure(options):
        report("lora_forward", options, transposed(rows))


if __name__ == "__main__":
    main()
