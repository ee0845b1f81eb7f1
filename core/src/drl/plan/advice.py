"""What to change when a recipe does not fit a card, and what would be faster when it does.

Each change is predicted by itself, in the order of what it costs: the first ones cost nothing but memory
traffic, the last ones seconds of every iteration. Where none is enough, changes are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drl.plan.predict import Prediction

MARGIN = 0.05
"""Share of a card that the driver, its context and pieces between allocations take."""

Change = tuple[tuple[str, ...], Mapping[str, Any]]
"""Settings as a recipe has them, named by the first, and the fields of a scenario that they change."""


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
    """Return changes that need less memory, cheapest first, then several at once where none fits alone.

    Empty when the recipe fits, and when no change helps.
    """
    if fits(prediction, memory):
        return []
    changed = [(change, prediction.instead(**change[1])) for change in changes(prediction)]
    found = without_excess(
        [
            _advice(change[0], then, memory)
            for change, then in changed
            if then.largest.room < prediction.largest.room
        ]
    )
    if any(one.fits for one in found):
        return found
    chosen = joined(prediction, memory)
    if len({option_of(change) for change in chosen}) < 2:
        return found
    settings = tuple(setting for change in chosen for setting in change[0])
    return [*found, _advice(settings, together(prediction, chosen), memory)]


def without_excess(found: list[Advice]) -> list[Advice]:
    """Leave out further values of an option that fits already, and those that help no more than the last."""
    last: dict[str, Advice] = {}
    kept = []
    for one in found:
        option = one.settings[0].partition(" = ")[0]
        before = last.get(option)
        if before is None or (not before.fits and one.room < before.room):
            kept.append(one)
            last[option] = one
    return kept


def option_of(change: Change) -> str:
    """Return the option that names a change."""
    return change[0][0].partition(" = ")[0]


def together(prediction: Prediction, chosen: Sequence[Change]) -> Prediction:
    """Return what several changes predict; parts that leave the device add up."""
    fields: dict[str, Any] = {}
    for _, changed in chosen:
        for name, value in changed.items():
            both = isinstance(value, frozenset) and name in fields
            fields[name] = fields[name] | value if both else value
    return prediction.instead(**fields)


def joined(prediction: Prediction, memory: int) -> list[Change]:
    """Return changes that fit together, in order of cost; where that cannot be, those that need least.

    One after another is taken that lowers the phase which is largest by then; then what turned out to be
    needless goes.
    """
    chosen: list[Change] = []
    now = prediction
    while not fits(now, memory):
        following = next_change(prediction, chosen, now)
        if following is None:
            break
        chosen = following
        now = together(prediction, chosen)
    return relaxed(prediction, chosen, max(budget(memory), now.largest.room))


def next_change(
    prediction: Prediction, chosen: Sequence[Change], now: Prediction
) -> list[Change] | None:
    """Return the changes with the cheapest further one that lowers the largest phase; None without one."""
    for group in (free(prediction), slower(prediction), last_resort(prediction)):
        found = []
        for change in group:
            more = put(chosen, change)
            then = together(prediction, more)
            if then.rooms[now.largest.name] < now.largest.room:
                found.append((total(then) or 0.0, more))
        if found:
            return min(found, key=lambda one: one[0])[1]
    return None


def put(chosen: Sequence[Change], change: Change) -> list[Change]:
    """Return the changes with one more, which takes the place of another value of its option."""
    return [*(one for one in chosen if option_of(one) != option_of(change)), change]


def relaxed(prediction: Prediction, chosen: list[Change], room: int) -> list[Change]:
    """Leave out or weaken changes as long as all phases find so much room: the costliest first."""
    order = list(changes(prediction))
    chosen = sorted(chosen, key=order.index)
    last = {option_of(change) for change in last_resort(prediction)}
    while True:
        found = []
        for change in reversed(chosen):
            others = [one for one in chosen if one is not change]
            weaker = [one for one in order if option_of(one) == option_of(change)]
            weaker = weaker[: weaker.index(change)]
            for fewer in (others, *(sorted([*others, one], key=order.index) for one in weaker)):
                then = together(prediction, fewer)
                if then.largest.room <= room:
                    kept = option_of(change) not in last
                    found.append(((kept, total(then) or 0.0), fewer))
        if not found:
            return chosen
        chosen = min(found, key=lambda one: one[0])[1]


def faster(prediction: Prediction, memory: int) -> list[Advice]:
    """Return changes that fit as well and take fewer seconds, the fastest first."""
    now = total(prediction)
    if now is None:
        return []
    found = [
        _advice(settings, prediction.instead(**fields), memory)
        for settings, fields in quicker(prediction)
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
    """Yield what can be changed, in order of cost; of several values of an option the weakest first."""
    yield from free(prediction)
    yield from slower(prediction)
    yield from last_resort(prediction)


def free(prediction: Prediction) -> Iterator[Change]:
    """Yield what costs next to nothing."""
    yield from of_the_engine(prediction)
    yield from of_the_pipeline(prediction)


def slower(prediction: Prediction) -> Iterator[Change]:
    """Yield what costs seconds."""
    yield from of_the_engines_rows(prediction)
    yield from of_the_micro_batch(prediction)
    yield from of_checkpointing(prediction)


def last_resort(prediction: Prediction) -> Iterator[Change]:
    """Yield what changes what is learnt, and moves that nothing here knows the seconds of."""
    scenario = prediction.scenario
    rank = prediction.lora_rank
    if rank is not None and rank > 1:
        factor = scenario.rank_factor / 2
        yield (f"lora.rank = {rank // 2}",), {"rank_factor": factor}
    yield from of_offload(prediction)


def of_offload(prediction: Prediction) -> Iterator[Change]:
    """Yield who can leave the device; an option of one side wins over the one of both, so that is named."""
    scenario = prediction.scenario
    # weights that are on the CPU already never move
    sides = {
        "offload_train": not (scenario.offload_train or scenario.cpu_offload),
        "offload_rollout": not scenario.offload_rollout,
    }
    left = {side: True for side, stays in sides.items() if stays and scenario.rollout}
    if len(left) == len(sides) and not scenario.offload_given:
        yield ("cluster.offload = true",), left
        return
    for side in left:
        yield (f"cluster.{side} = true",), {side: True}


def of_the_engine(prediction: Prediction) -> Iterator[Change]:
    """Yield forwards that keep no memory, and weights that take less than a copy in float32."""
    engine, scenario = prediction.engine, prediction.scenario
    if engine is not None and engine.graphs_option is not None and scenario.graphs:
        yield (f"{engine.graphs_option} = false",), {"graphs": False}
    if engine is None or engine.weights_option is None or scenario.own_weights == "shared":
        return
    if scenario.adapters and scenario.shareable:
        yield (f'{engine.weights_option} = "shared"',), {"own_weights": "shared"}
    elif scenario.own_weights == "fp32" and scenario.forward_size < 4:
        yield (f'{engine.weights_option} = "forward"',), {"own_weights": "forward"}


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
        yield (setting,), {"released": scenario.released | names}
    if outline.decode_option is not None and scenario.decode_rows > 1:
        yield (f"{outline.decode_option} = 1",), {"decode_rows": 1}


def of_the_engines_rows(prediction: Prediction) -> Iterator[Change]:
    """Yield forwards of fewer rows: half, a quarter and so on."""
    engine, scenario = prediction.engine, prediction.scenario
    if engine is None or engine.rows_option is None or not scenario.rollout:
        return
    rows = scenario.engine_rows // 2
    while rows:
        yield (f"{engine.rows_option} = {rows}",), {"engine_rows": rows}
        rows //= 2


def of_the_micro_batch(prediction: Prediction) -> Iterator[Change]:
    """Yield smaller micro-batches: half, a quarter and so on; gradients stay the same."""
    rows = prediction.scenario.rows // 2
    while rows >= prediction.scenario.row_steps:
        yield with_rows(prediction, rows)
        rows //= 2


def of_checkpointing(prediction: Prediction) -> Iterator[Change]:
    """Yield the recipe's share of blocks that are recomputed, where none is, and then all of them."""
    scenario = prediction.scenario
    switch = () if scenario.checkpointed else ("model.gradient_checkpointing = true",)
    if switch:
        yield switch, {"checkpointed": scenario.checkpointed_share}
    if scenario.checkpointed_share < 1.0:
        yield (*switch, "model.checkpointed_share = 1.0"), {"checkpointed": 1.0}


def quicker(prediction: Prediction) -> Iterator[Change]:
    """Yield what trades memory for seconds: no checkpointing, larger micro-batches."""
    scenario = prediction.scenario
    if scenario.checkpointed:
        yield ("model.gradient_checkpointing = false",), {"checkpointed": 0.0}
    for factor in (2, 4):
        if scenario.rows * factor <= scenario.rank_pairs:
            yield with_rows(prediction, scenario.rows * factor)


def with_rows(prediction: Prediction, rows: int) -> Change:
    """Return the setting of so many pairs in a forward."""
    scenario = prediction.scenario
    value = rows // scenario.row_steps
    rows = value * scenario.row_steps
    return (f"{scenario.row_option} = {value}",), {
        "rows": rows,
        "micro_batches": -(-scenario.rank_pairs // rows),
    }
