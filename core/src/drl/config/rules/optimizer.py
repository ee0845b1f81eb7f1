"""Rules of the learning-rate schedule (rl-post-training reference 8.6)."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.errors import Problem


def order_of_rates(draft: Draft) -> Iterator[Problem]:
    """0 <= min_lr <= lr and lr_warmup_init <= lr."""
    lr = draft.get("optimizer.lr")
    for key in ("optimizer.min_lr", "optimizer.lr_warmup_init"):
        if (value := draft.get(key)) > lr:
            yield Problem(key, f"must be at most optimizer.lr = {lr}, got {value}")


def warmup_before_end(draft: Draft) -> Iterator[Problem]:
    """The warm-up ends before the decay does."""
    warmup, end = draft.get("optimizer.lr_warmup_iters"), draft.get("optimizer.lr_decay_iters")
    fraction = draft.get("optimizer.lr_warmup_fraction")
    if fraction is not None and warmup:
        yield Problem(
            "optimizer.lr_warmup_iters",
            "is not used: optimizer.lr_warmup_fraction wins over it",
            "warning",
        )
    elif end is not None and warmup >= end and warmup:
        yield Problem(
            "optimizer.lr_warmup_iters",
            f"must be below optimizer.lr_decay_iters = {end}"
            f"{_derived(draft, 'optimizer.lr_decay_iters')}, got {warmup}",
        )


def _derived(draft: Draft, path: str) -> str:
    return "" if draft.given(path) else " (iterations x optimizer steps per rollout)"


def tail_of_wsd(draft: Draft) -> Iterator[Problem]:
    """WSD needs the length and shape of its tail; no other style has one."""
    keys = ("optimizer.lr_wsd_decay_iters", "optimizer.lr_wsd_decay_style")
    values = [draft.get(key) for key in keys]
    style = draft.get("optimizer.lr_decay_style")
    for key, value in zip(keys, values, strict=True):
        if style == "WSD" and value is None:
            yield Problem(key, "is required by optimizer.lr_decay_style 'WSD'")
        elif style != "WSD" and value is not None:
            yield Problem(
                key, f"is not used: optimizer.lr_decay_style is {style!r}, not 'WSD'", "warning"
            )
    tail, end = values[0], draft.get("optimizer.lr_decay_iters")
    if style == "WSD" and tail is not None and end is not None and tail > end:
        yield Problem(keys[0], f"must be at most optimizer.lr_decay_iters = {end}, got {tail}")


OPTIMIZER_RULES = (order_of_rates, warmup_before_end, tail_of_wsd)
