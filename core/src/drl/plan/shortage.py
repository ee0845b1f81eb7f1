"""A GPU that ran out of memory, as a message: in which phase, what the plan says, three things to change."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drl.errors import OutOfMemory, RankError

if TYPE_CHECKING:
    from drl.catalog import Catalog
    from drl.plan.advice import Change
    from drl.plan.predict import Prediction

KNOBS = 3
GIB = 2**30
OF_A_RANK = "OutOfMemoryError"
START = "start"
"""What is said for the phase of a run that has not begun its first one."""

WITHOUT_PLAN: Mapping[str, tuple[str, ...]] = {
    "train": (
        "train.micro_batch_size lower",
        "model.gradient_checkpointing = true",
        "lora.rank lower",
    ),
    "": (
        "rollout.microgroup_size and the engine's rows lower",
        "cluster.offload = true",
        "train.micro_batch_size lower",
    ),
}
"""What to turn where a recipe cannot be predicted, by phase; "" for all others."""


def shortage(
    error: BaseException, recipe: Any, catalog: Catalog, phase: str | None
) -> OutOfMemory | None:
    """Return the error to show instead, where a GPU ran out of memory; None for any other error."""
    found = next((one for one in chain(error) if is_shortage(one)), None)
    if found is None:
        return None
    name = phase or START
    lines = [f"out of memory in {name}: {words_of(found)}", *told(recipe, catalog, name)]
    return OutOfMemory("\n".join(lines))


def words_of(error: BaseException) -> str:
    """Return the allocator's first line; of another rank, that line of its traceback."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    found = [line.strip() for line in rest if OF_A_RANK in line]
    if isinstance(error, RankError) and found:
        return f"{first.partition(' failed')[0]}: {found[-1]}"
    return first


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_shortage(error: BaseException) -> bool:
    """Say whether a GPU's allocator had no room, here or on another rank."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RankError) and OF_A_RANK in str(error)


def told(recipe: Any, catalog: Catalog, phase: str) -> list[str]:
    """Return the plan's numbers and what to change; general knobs where there is no plan."""
    from drl.plan.predict import predict

    try:
        prediction = predict(recipe, catalog)
    # an explanation that fails must not take the place of what it explains
    except Exception:
        general = WITHOUT_PLAN.get(phase, WITHOUT_PLAN[""])
        return ["turn one of these:", *(f"  {line}" for line in general)]
    expected = [f"{one.name} {one.room / GIB:.1f} GiB" for one in prediction.phases]
    if prediction.card.memory is not None:
        expected.append(f"the card has {prediction.card.memory / GIB:.1f} GiB")
    lines = [f"the plan: {', '.join(expected)}"]
    knobs = best_changes(prediction, phase)
    if knobs:
        lines += [f"turn one of these, with what {knobs[0][1]} then needs:"]
        lines += [f"  {text}: {room / GIB:.1f} GiB" for text, _, room in knobs]
    return [*lines, "drl plan RECIPE shows all of it; other programs on the card count too"]


def best_changes(prediction: Prediction, phase: str) -> list[tuple[str, str, int]]:
    """Return the changes that help a phase most, cheapest first: setting, phase, bytes that it then needs.

    For a phase that the plan does not know, such as the start, it is the largest one that counts.
    """
    from drl.plan.advice import changes

    name = phase if phase in prediction.rooms else prediction.largest.name
    before = prediction.rooms[name]
    found = [
        (", ".join(change[0]), prediction.instead(**change[1]).rooms[name])
        for change in one_of_each(list(changes(prediction)))
    ]
    useful = [(text, room) for text, room in found if room < before]
    kept = {text for text, _ in sorted(useful, key=lambda one: one[1])[:KNOBS]}
    return [(text, name, room) for text, room in useful if text in kept]


def one_of_each(found: Sequence[Change]) -> list[Change]:
    """Return the first change of every option."""
    from drl.plan.advice import option_of

    first: dict[str, Change] = {}
    for change in found:
        first.setdefault(option_of(change), change)
    return list(first.values())
