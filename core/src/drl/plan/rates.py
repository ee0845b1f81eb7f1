"""Measured rates of cards: observations in a small JSON file, and the lines that are fitted through them.

An observation says that ``calls`` calls of a kind with ``work`` between them took ``value``. What is known of
a kind is ``value = fixed * calls + slope * work`` with the two non-negative numbers that fit best: many
small calls pay the first, large ones the second. One size alone gives a slope and no fixed part.

Two files are read: the user's own, which runs on this machine fill, and the one that ships. Where the user's
has observations of a kind, those alone count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from drl.errors import DataError
from drl.observe.files import number, write_json_atomic

VARIABLE = "DRL_RATES"
"""Environment variable that names another file than the one in the user's cache folder."""

SHIPPED = "measured.json"
FORMAT = 1

FORWARD = "forward"
APPLIED = "applied"
TRAINING = "training"
RECOMPUTED = "recomputed"
DECODE = "decode_"
"""Followed by how it is decoded, one of ``DECODERS``."""
DECODERS = tuple(f"{dtype}{end}" for dtype in ("fp32", "bf16", "fp16") for end in ("", "_compiled"))
DECODED = "seconds of decoding media; work in megapixels, frames counted, one call a batch"
SAMPLE = "sample"
SYNC = "sync"
DRIVER = "driver"
ACTIVATIONS = "activations"
WORKSPACE = "workspace"

ROUNDING = 1e-9
"""Two observations whose work by call differs by less than the root of this tell one rate between them."""

KINDS: Mapping[str, str] = {
    FORWARD: "seconds of forwards without gradient; work in FLOP, one call a forward",
    APPLIED: "seconds of adapters that such forwards apply; work in their FLOP, one call a forward",
    TRAINING: "seconds of forward and backward; work in FLOP, one call a micro-batch",
    RECOMPUTED: "seconds of second forwards of checkpointed blocks; work in FLOP, one call a micro-batch",
    **{f"{DECODE}{how}": f"{DECODED}, in {how}" for how in DECODERS},
    SAMPLE: "seconds of what a rollout does beside forwards and decoding; work in samples",
    SYNC: "seconds of pushes; work in bytes pushed, one call a push",
    DRIVER: "seconds of an iteration outside its phases; one call an iteration",
    ACTIVATIONS: "bytes that training really kept; work in bytes that it keeps in eager mode",
    WORKSPACE: "bytes of libraries and of rounding beside what tensors take; no work, one call",
}
"""What can be observed, and in which units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateKey:
    """What rates hold for. ``torch``: its version without the build; ``compiled``: blocks are compiled."""

    device: str
    torch: str
    dtype: str
    compiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """``calls`` calls of a kind of ``KINDS`` with ``work`` between them took ``value``."""

    kind: str
    work: float
    calls: float = 1.0
    value: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """``value = fixed * calls + slope * work``, both non-negative."""

    fixed: float
    slope: float

    def __call__(self, *, work: float, calls: float = 1.0) -> float:
        """Return what so many calls with so much work take."""
        return self.fixed * calls + self.slope * work


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What is known of a card: one line per kind. ``torch``: the version that they were measured with."""

    key: RateKey
    torch: str
    lines: Mapping[str, Line]

    def value(self, kind: str, *, work: float, calls: float = 1.0) -> float | None:
        """Return the value of so many calls with so much work; None where the kind was never observed."""
        line = self.lines.get(kind)
        return None if line is None else line(work=work, calls=calls)


@dataclass(frozen=True, slots=True)
class Table:
    """All observations by what they hold for."""

    rows: Mapping[RateKey, tuple[Observation, ...]] = field(default_factory=dict)


def release(version: str) -> str:
    """Return a torch version without its build: ``2.11.0+cu130`` is ``2.11.0``."""
    return version.partition("+")[0]


def rates_path() -> Path:
    """Return the user's file: ``DRL_RATES``, or ``drl/rates.json`` in the cache folder of the system."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    root = Path(cache) if cache else Path.home() / ".cache"
    return root / "drl" / "rates.json"


def record_rates(
    key: RateKey,
    observations: Iterable[Observation],
    path: Path | None = None,
    *,
    forget: Collection[str] = (),
) -> Path:
    """Add observations to the user's file and return where it is.

    A new observation of a kind takes the place of older ones with the same work per call, so the file
    stays small and the latest measurement counts. Older ones of kinds to ``forget`` go, whatever their work.
    DataError for a file that is none of drl's.
    """
    file = rates_path() if path is None else path
    new = list(observations)
    for one in new:
        _check(one)
    known = dict(read_table(file).rows) if file.exists() else {}
    places = {_place(one) for one in new}
    kept = [
        one for one in known.get(key, ()) if _place(one) not in places and one.kind not in forget
    ]
    known[key] = (*kept, *new)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(file, as_json(Table(known)))
    return file


def _place(one: Observation) -> tuple[str, float, float]:
    """Return what two observations of the same thing have in common: kind, work per call, calls."""
    return one.kind, float(f"{one.work / max(one.calls, 1e-12):.2g}"), one.calls


def as_json(table: Table) -> dict[str, Any]:
    """Return the content of a file of rates."""
    cards = [
        {**asdict(key), "observations": [asdict(one) for one in observations]}
        for key, observations in table.rows.items()
    ]
    return {"format": FORMAT, "cards": cards}


def read_table(path: Path) -> Table:
    """Read a file of rates; DataError, which names the file, for anything else."""
    try:
        return _table(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no file of measured rates: {error}\n"
            f"remove it, or name another one by the variable {VARIABLE}; drl bench RECIPE writes it anew"
        ) from error


def shipped_table() -> Table:
    """Return the rates that come with drl."""
    return _table(json.loads((files("drl.plan") / SHIPPED).read_text()))


def _table(content: Mapping[str, Any]) -> Table:
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']}, this drl reads {FORMAT}")
    rows: dict[RateKey, tuple[Observation, ...]] = {}
    for card in _list(content, "cards"):
        key = RateKey(**{name: card[name] for name in RateKey.__dataclass_fields__})
        words = (key.device, key.torch, key.dtype)
        if not all(isinstance(word, str) for word in words) or not isinstance(key.compiled, bool):
            raise ValueError(f"device, torch and dtype are text, compiled is true or false: {key}")
        rows[key] = tuple(Observation(**one) for one in _list(card, "observations"))
        for one in rows[key]:
            _check(one)
    return Table(rows)


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    found = content[name]
    if not isinstance(found, list):
        raise ValueError(f"its {name} are no list")
    return found


def _check(one: Observation) -> None:
    """Raise DataError for an observation that no rate can be made of."""
    if one.kind not in KINDS:
        raise DataError(f"nothing is observed as {one.kind!r}; there are {', '.join(KINDS)}")
    figures = [number(value) for value in (one.work, one.calls, one.value)]
    if any(figure is None or figure < 0 for figure in figures):
        raise DataError(f"work, calls and value are numbers, none of them negative: {one}")
    if not one.value and one.kind != DRIVER:
        raise DataError(f"only a driver takes no time: {one}")
    # activations are a share of their work, whatever the calls
    if not (one.work if one.kind == ACTIVATIONS else one.calls):
        raise DataError(f"nothing was done: {one}")


def find_rates(key: RateKey) -> Rates | None:
    """Return what is known of a card, the user's observations before the shipped; None when nothing is.

    The user's observations of one size alone tell no line: they scale the shipped one. Rates of another torch
    version stand in for those of this one: ``Rates.torch`` says which.
    """
    own = read_table(rates_path()) if rates_path().exists() else Table()
    shipped = shipped_table()
    version, mine = _observed(own, key)
    other, theirs = _observed(shipped, key)
    if not mine and not theirs:
        return None
    lines = {kind: fit(group) for kind, group in theirs.items()}
    for kind, group in mine.items():
        lines[kind] = (
            scaled(lines[kind], group) if kind in lines and one_size(group) else fit(group)
        )
    return Rates(key=key, torch=version or other, lines=lines)


def _observed(table: Table, key: RateKey) -> tuple[str, dict[str, list[Observation]]]:
    """Return a card's observations by kind, those of the nearest torch version, and that version.

    A kind that was observed with another version alone stands in, so that one new figure does not hide the rest.
    """
    found = _nearest(table, key)
    groups: dict[str, list[Observation]] = {}
    for known in found:
        here: dict[str, list[Observation]] = {}
        for one in table.rows[known]:
            here.setdefault(one.kind, []).append(one)
        groups = here | groups
    return found[0].torch if found else "", groups


def one_size(observations: Sequence[Observation]) -> bool:
    """Return whether all have the same work by call."""
    return len({_place(one)[1] for one in observations if one.value > 0}) < 2


def scaled(line: Line, observations: Sequence[Observation]) -> Line:
    """Return the line, faster or slower by the median ratio of observations to it."""
    ratios = [
        one.value / expected
        for one in observations
        if (expected := line(work=one.work, calls=one.calls)) > 0
    ]
    factor = median(ratios) if ratios else 1.0
    return Line(line.fixed * factor, line.slope * factor)


def _nearest(table: Table, key: RateKey) -> list[RateKey]:
    """Return the keys with the same card, dtype and compilation: of this torch version, then the latest first."""
    same = [
        known
        for known in table.rows
        if (known.device, known.dtype, known.compiled) == (key.device, key.dtype, key.compiled)
    ]
    return sorted(
        same, key=lambda known: (known.torch == key.torch, _numbers(known.torch)), reverse=True
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def fit(observations: Sequence[Observation]) -> Line:
    """Return the line with the least sum of squared relative errors, without negative parts.

    Each observation counts by its relative error, so that a small batch matters as much as a large one.
    """
    rows = [(one.calls / one.value, one.work / one.value) for one in observations if one.value > 0]
    if not rows:
        return Line(0.0, 0.0)
    cc = sum(c * c for c, _ in rows)
    ww = sum(w * w for _, w in rows)
    cw = sum(c * w for c, w in rows)
    c1, w1 = sum(c for c, _ in rows), sum(w for _, w in rows)
    determinant = cc * ww - cw * cw
    if one_size(observations) or determinant <= ROUNDING * cc * ww:
        return _one_sided(rows)
    fixed, slope = (c1 * ww - w1 * cw) / determinant, (w1 * cc - c1 * cw) / determinant
    if fixed >= 0 and slope >= 0:
        return Line(fixed, slope)
    # the best point of the quadrant lies on one of its axes
    return Line(0.0, w1 / ww) if fixed < 0 else Line(c1 / cc, 0.0)


def _one_sided(rows: Sequence[tuple[float, float]]) -> Line:
    """Return the median rate of observations of one size: by work, or by call where there is none."""
    if any(work for _, work in rows):
        return Line(0.0, median(1 / work for _, work in rows if work))
    return Line(median(1 / calls for calls, _ in rows), 0.0)
