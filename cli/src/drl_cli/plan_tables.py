"""Tables and JSON of ``drl plan``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from drl.plan.advice import Advice, advise, budget, faster, fits, total
from drl.plan.predict import Prediction, no_rates
from drl.plan.scaling import scaled
from drl.stages.pairs import BatchPlan
from drl_cli.wide import wide_console

GIB = 2**30
TFLOP = 1e12


def show(found: Prediction | str) -> None:
    """Print memory, work, seconds and advice, or why there is none of them."""
    if isinstance(found, str):
        click.echo(f"memory and work are not predicted: {found}")
        return
    console = wide_console()
    console.print()
    console.print(memory_table(found))
    console.print(work_table(found))
    for line in remarks(found):
        click.echo(line)


def memory_table(found: Prediction) -> Table:
    """Return the phases with what each holds."""
    table = Table(title="Memory at the worst moment of each phase, GiB", title_justify="left")
    table.add_column("phase")
    table.add_column("at")
    recorded = any(phase.graphs for phase in found.phases)
    for name in ("weights", "state", "data", "activations", "peak", *["graphs"] * recorded):
        table.add_column(name, justify="right")
    for phase in found.phases:
        cells = (phase.weights, phase.state, phase.data, phase.activations + phase.workspace)
        kept = [phase.graphs] * recorded
        table.add_row(phase.name, phase.moment, *map(gib, (*cells, phase.peak, *kept)))
    table.caption = "state: gradients, optimizer, averages"
    table.caption_justify = "left"
    return table


def work_table(found: Prediction) -> Table:
    """Return the work of an iteration, and its seconds where rates were measured."""
    table = Table(title="One iteration", title_justify="left")
    table.add_column("phase")
    for name in ("TFLOP", "calls", "seconds", "share"):
        table.add_column(name, justify="right")
    seconds, whole = found.seconds or {}, total(found)
    for name, flops, calls in work_rows(found):
        took = seconds.get(name)
        table.add_row(
            name,
            "" if flops is None else tflop(flops),
            "" if calls is None else f"{calls:,}",
            "" if took is None else f"{took:.2f}",
            "" if took is None or not whole else f"{took / whole:.0%}",
        )
    if whole is not None:
        table.add_section()
        table.add_row("iteration", tflop(found.work.total), "", f"{whole:.2f}", "")
    return table


def work_rows(found: Prediction) -> Iterator[tuple[str, float | None, int | None]]:
    """Yield phase, work and calls; second forwards and passes without gradient belong to training."""
    work, seconds = found.work, found.seconds or {}
    if found.scenario.rollout:
        yield "rollout", work.sampling, work.sampling_calls
    yield "train", work.training + work.recomputed + work.scored, work.micro_batches
    if work.recomputed:
        yield "  recomputed", work.recomputed, None
    if work.scored:
        yield "  without gradient", work.scored, work.scored_calls
    for name in seconds:
        if name not in {"rollout", "train"}:
            yield name, None, None


def remarks(found: Prediction) -> Iterator[str]:
    """Yield what a person should know besides the tables."""
    if found.seconds is None:
        yield no_rates(found)
    else:
        yield from speed_lines(found)
    scenario = found.scenario
    if scenario.omitted:
        yield f"work and seconds are without {', without '.join(scenario.omitted)}"
    if scenario.uncounted:
        yield f"not counted: {', '.join(scenario.uncounted)}"
    memory = found.card.memory
    if memory is None:
        yield "say what it should fit with --memory, for example --memory 24GiB"
        return
    largest = found.largest
    verdict = "fits" if fits(found, memory) else "does not fit"
    yield (
        f"{verdict}: {largest.name} needs {gib(largest.room)} GiB, {gib(budget(memory))} of the card's "
        f"{gib(memory)} GiB can be counted on"
    )
    yield from what_to_change(found, memory)


def what_to_change(found: Prediction, memory: int) -> Iterator[str]:
    """Yield changes that make a recipe fit, or that make one faster which fits."""
    if fits(found, memory):
        advices = faster(found, memory)
        if advices:
            yield "faster, and fits as well:"
    else:
        advices = advise(found, memory)
        if not advices:
            yield "no setting that drl knows makes it fit"
    for advice in advices:
        yield from advice_lines(advice)


def speed_lines(found: Prediction) -> Iterator[str]:
    """Yield images and pairs a second, and whose rates they come from."""
    seconds, scenario = found.seconds or {}, found.scenario
    parts = []
    if scenario.rollout:
        parts.append(f"{scenario.samples / seconds['rollout']:.1f} images/s")
    parts.append(f"{found.work.pairs / seconds['train']:.1f} pairs/s")
    rates = found.rates.trainer
    version = "" if rates is None or rates.torch == found.card.torch else f" (torch {rates.torch})"
    yield f"{', '.join(parts)}; rates measured on {found.card.name}{version}"


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yield one change with what it needs; changes that belong together one below another."""
    seconds = "" if advice.seconds is None else f", {advice.seconds:.2f} s an iteration"
    alone = len(advice.settings) == 1
    mark = "" if advice.fits else " (does not fit alone)" if alone else " (does not fit)"
    what = advice.settings[0] if alone else "all of these"
    yield f"  {what}: {gib(advice.room)} GiB{seconds}{mark}"
    for setting in () if alone else advice.settings:
        yield f"    {setting}"
    if any(setting.startswith("cluster.offload") for setting in advice.settings):
        yield "    plus the moves between CPU and GPU"


def gib(count: float) -> str:
    """Return bytes as GiB with what a person reads of it."""
    return f"{count / GIB:.2f}" if count < 10 * GIB else f"{count / GIB:.1f}"


def tflop(count: float) -> str:
    """Return FLOP as TFLOP with three digits or more."""
    return f"{count / TFLOP:,.1f}" if count >= 100 * TFLOP else f"{count / TFLOP:.3g}"


def as_plain(batch: BatchPlan, gpus: Sequence[int], found: Prediction | str) -> str:
    """Return everything as one JSON object: bytes, FLOP, seconds."""
    content: dict[str, Any] = {"batch": batch_facts(batch)}
    if gpus:
        content["gpus"] = [batch_facts(one) for one in scaled(batch, gpus)]
    if isinstance(found, str):
        return json.dumps({**content, "reason": found}, indent=2)
    memory = found.card.memory
    quicker = faster(found, memory) if memory is not None and fits(found, memory) else []
    content |= {
        "card": {"name": found.card.name, "memory": memory, "torch": found.card.torch},
        "phases": [
            {**asdict(phase), "peak": phase.peak, "room": phase.room} for phase in found.phases
        ],
        "budget": None if memory is None else budget(memory),
        "work": {**asdict(found.work), "total": found.work.total},
        "seconds": None if found.seconds is None else dict(found.seconds),
        "iteration": total(found),
        "rates": rates_facts(found),
        "without": list(found.scenario.omitted),
        "not_counted": list(found.scenario.uncounted),
        "reason": no_rates(found) if found.seconds is None else None,
        "fits": None if memory is None else fits(found, memory),
        "advice": [] if memory is None else [asdict(one) for one in advise(found, memory)],
        "faster": [asdict(one) for one in quicker],
    }
    return json.dumps(content, indent=2)


def rates_facts(found: Prediction) -> dict[str, str | None]:
    """Return the torch version that the rates of engine and trainer were measured with; None without rates."""
    sides = {"engine": found.rates.engine, "trainer": found.rates.trainer}
    return {side: None if rates is None else rates.torch for side, rates in sides.items()}


def batch_facts(batch: BatchPlan) -> dict[str, int]:
    """Return the batch arithmetic by name."""
    return {
        "ranks": batch.ranks,
        "prompts": batch.prompts,
        "samples": batch.samples,
        "optimizer_steps": batch.optimizer_steps,
        "images_per_update": batch.samples_per_step,
        "pairs_per_step": batch.pairs_per_step,
        "micro_batches": batch.micro_batches,
        "rows": batch.rows,
        "filler": batch.filler,
    }
