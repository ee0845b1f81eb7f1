"""The learning rate at an optimizer step (rl-post-training reference 8.6; the rules of Megatron-LM's schedule)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from drl.errors import BadInput, CheckpointError

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

# share of the way from min_lr to lr that is left after a share q of the decay
DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda q: 1.0 - q,
        "cosine": lambda q: 0.5 * (math.cos(math.pi * q) + 1.0),
        "exponential": lambda q: 2.0 * 0.5**q - 1.0,
        "minus_sqrt": lambda q: 1.0 - math.sqrt(q),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Settings of a schedule; named after the options of ``[optimizer]``.

    ``warmup`` steps may be a fraction and are not rounded. ``decay_iters``: step at which ``min_lr``
    is reached. ``wsd_*``: length and shape of the tail of style "WSD". Raises BadInput for settings
    that contradict each other.
    """

    lr: float
    decay_iters: int
    style: str = "constant"
    min_lr: float = 0.0
    warmup: float = 0.0
    warmup_init: float = 0.0
    wsd_decay_iters: int | None = None
    wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        for fits, option, message in _rules(self):
            if not fits:
                raise BadInput(f"optimizer.{option} {message}")


def _rules(settings: ScheduleSettings) -> list[tuple[bool, str, str]]:
    s = settings
    rules = [
        (s.style in STYLES, "lr_decay_style", f"is {s.style!r}; it must be one of {STYLES}"),
        (0 <= s.min_lr <= s.lr, "min_lr", f"is {s.min_lr}; it must be from 0 to lr = {s.lr}"),
        (
            s.warmup_init <= s.lr,
            "lr_warmup_init",
            f"is {s.warmup_init}; it must not be above lr = {s.lr}",
        ),
        (s.decay_iters > 0, "lr_decay_iters", f"is {s.decay_iters}; it must be above 0"),
        (
            0 <= s.warmup < s.decay_iters,
            "lr_warmup_iters",
            f"is {s.warmup}; it must be from 0 to below lr_decay_iters = {s.decay_iters}",
        ),
    ]
    if s.style != "WSD":
        return rules
    tail = s.wsd_decay_iters
    return [
        *rules,
        (
            tail is not None and tail > 0,
            "lr_wsd_decay_iters",
            f"is {tail}; lr_decay_style 'WSD' needs it above 0",
        ),
        (
            s.wsd_decay_style in DECAYS,
            "lr_wsd_decay_style",
            f"is {s.wsd_decay_style!r}; lr_decay_style 'WSD' needs one of {tuple(DECAYS)}",
        ),
    ]


def learning_rate(step: int, settings: ScheduleSettings) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    With a warm-up the very first step runs at ``warmup_init``.
    """
    s = settings
    if s.warmup > 0 and step <= s.warmup:
        return s.warmup_init + (s.lr - s.warmup_init) * step / s.warmup
    if s.style == "constant":
        return s.lr
    if step > s.decay_iters:
        return s.min_lr
    if s.style == "inverse-square-root":
        return max(s.min_lr, s.lr * math.sqrt(max(s.warmup, 1)) / math.sqrt(max(step, 1)))
    return s.min_lr + _remaining(step, s) * (s.lr - s.min_lr)


def _remaining(step: int, s: ScheduleSettings) -> float:
    """Return 1 at the start of the decay, 0 at its end."""
    if s.style != "WSD":
        return DECAYS[s.style]((step - s.warmup) / (s.decay_iters - s.warmup))
    assert s.wsd_decay_iters is not None
    assert s.wsd_decay_style is not None
    start = s.decay_iters - s.wsd_decay_iters
    if step <= start:
        return 1.0
    return DECAYS[s.wsd_decay_style]((step - start) / s.wsd_decay_iters)


def schedule_state(settings: ScheduleSettings) -> dict[str, Any]:
    """Return what a checkpoint keeps of a schedule, as JSON values; the step is the trainer's own."""
    return asdict(settings)


def settings_from_state(state: Mapping[str, Any]) -> ScheduleSettings:
    """Return the schedule that ``schedule_state`` wrote; CheckpointError when it is none."""
    known = {field.name for field in fields(ScheduleSettings)}
    if state.keys() != known:
        raise CheckpointError(f"it has the settings {sorted(state)}; they must be {sorted(known)}")
    try:
        return ScheduleSettings(**state)
    except (BadInput, TypeError) as error:
        raise CheckpointError(str(error)) from error
