"""What to change when a recipe does not fit a card, and what would be faster when it does.

Each change is predicted by itself, in the order of what it costs: the first ones cost nothing but memory
traffic, the last ones seconds of every iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drl.plan.predict import Prediction

MARGIN = 0.05
"""Share of a card that the driver, its context and pieces between allocations take."""

Change = tuple[str, Mapping[str, Any]]
"""A setting as a recipe has it, and the fields of a scenario that it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change. ``settings``: lines of a recipe. ``room``: bytes after it; ``seconds``: of an iteration."""

    settings: tuple[str, ...]
    room: int
    fits: bool
    seconds: float | None


def budget(memory: int) -> int:
    """Return the bytes that a run can count on, of a card with so many."""
    return int(memory * (1 - MARGIN))


def fits(prediction: Prediction, memory: int) -> bool:
    """Say whether the largest phase finds room."""
    return prediction.largest.room <= budget(memory)


def advise(prediction: Prediction, memory: int) -> list[Advice]:
    """Return changes that need less memory, cheapest first, then all of them one upon another until it fits.

    Empty when the recipe fits.
    """
    if fits(prediction, memory):
        return []
    changed = [(change, prediction.instead(**change[1])) for change in changes(prediction)]
    helpful = [
        (change, then) for change, then in changed if then.largest.room < prediction.largest.room
    ]
    found = without_excess([_advice((change[0],), then, memory) for change, then in helpful])
    if any(one.fits for one in found):
        return found
    settings: dict[str, str] = {}
    both = prediction
    for (text, fields), _ in helpful:
        settings[text.partition(" = ")[0]] = text
        both = both.instead(**fields)
        if fits(both, memory):
            break
    return [*found, _advice(tuple(settings.values()), both, memory)]


def without_excess(found: list[Advice]) -> list[Advice]:
    """Leave out further values of an option that fits already."""
    enough: set[str] = set()
    kept = []
    for one in found:
        option = one.settings[0].partition(" = ")[0]
        if option not in enough:
            kept.append(one)
        if one.fits:
            enough.add(option)
    return kept


def faster(prediction: Prediction, memory: int) -> list[Advice]:
    """Return changes that fit as well and take fewer seconds, the fastest first."""
    now = total(prediction)
    if now is None:
        return []
    found = [
        _advice((text,), prediction.instead(**fields), memory)
        for text, fields in quicker(prediction)
    ]
    better = [one for one in found if one.fits and one.seconds is not None and one.seconds < now]
    return sorted(better, key=lambda one: one.seconds or 0.0)


def total(prediction: Prediction) -> float | None:
    """Return the seconds of an iteration."""
    return None if prediction.seconds is None else sum(prediction.seconds.values())


def _advice(settings: tuple[str, ...], prediction: Prediction, memory: int) -> Advice:
    return Advice(
        settings=settings,
        room=prediction.largest.room,
        fits=fits(prediction, memory),
        seconds=total(prediction),
    )


def changes(prediction: Prediction) -> Iterator[Change]:
    """Yield what can be changed, in order of cost."""
    yield from of_the_engine(prediction)
    yield from of_the_pipeline(prediction)
    yield from of_the_micro_batch(prediction)
    scenario = prediction.scenario
    if scenario.checkpointed < 1.0:
        yield "model.gradient_checkpointing = true", {"checkpointed": 1.0}
    rank = prediction.lora_rank
    if rank is not None and rank > 1:
        factor = scenario.rank_factor / 2
        yield f"lora.rank = {rank // 2}", {"rank_factor": factor}
    if scenario.rollout and not (scenario.offload_train and scenario.offload_rollout):
        yield "cluster.offload = true", {"offload_train": True, "offload_rollout": True}


def of_the_engine(prediction: Prediction) -> Iterator[Change]:
    """Yield forwards that keep no memory, and weights that take less than a copy in float32."""
    engine, scenario = prediction.engine, prediction.scenario
    if engine is not None and engine.graphs_option is not None and scenario.graphs:
        yield f"{engine.graphs_option} = false", {"graphs": False}
    if engine is None or engine.weights_option is None or scenario.own_weights == "shared":
        return
    if scenario.adapters and scenario.shards == 1:
        yield f'{engine.weights_option} = "shared"', {"own_weights": "shared"}
    elif scenario.own_weights == "fp32" and scenario.forward_size < 4:
        yield f'{engine.weights_option} = "forward"', {"own_weights": "forward"}


def of_the_pipeline(prediction: Prediction) -> Iterator[Change]:
    """Yield parts that can leave the device, and smaller decodes."""
    outline, scenario = prediction.anatomy.outline, prediction.scenario
    if not scenario.rollout:
        return
    by_setting: dict[str, frozenset[str]] = {}
    for part in outline.parts:
        if part.release is not None and part.name not in scenario.released:
            by_setting[part.release] = by_setting.get(part.release, frozenset()) | {part.name}
    for setting, names in by_setting.items():
        yield setting, {"released": scenario.released | names}
    if outline.decode_option is not None and scenario.decode_rows > 1:
        yield f"{outline.decode_option} = 1", {"decode_rows": 1}


def of_the_micro_batch(prediction: Prediction) -> Iterator[Change]:
    """Yield smaller micro-batches: half, a quarter and so on; gradients stay the same."""
    rows = prediction.scenario.rows // 2
    while rows >= prediction.scenario.row_steps:
        yield with_rows(prediction, rows)
        rows //= 2


def quicker(prediction: Prediction) -> Iterator[Change]:
    """Yield what trades memory for seconds: no checkpointing, larger micro-batches."""
    scenario = prediction.scenario
    if scenario.checkpointed:
        yield "model.gradient_checkpointing = false", {"checkpointed": 0.0}
    for factor in (2, 4):
        if scenario.rows * factor <= scenario.rank_pairs:
            yield with_rows(prediction, scenario.rows * factor)


def with_rows(prediction: Prediction, rows: int) -> Change:
    """Return the setting of so many pairs in a forward."""
    scenario = prediction.scenario
    value = rows // scenario.row_steps
    rows = value * scenario.row_steps
    return f"{scenario.row_option} = {value}", {
        "rows": rows,
        "micro_batches": -(-scenario.rank_pairs // rows),
    }
