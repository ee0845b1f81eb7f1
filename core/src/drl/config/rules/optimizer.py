"""Rules of the optimizer, its schedule and its dtypes (rl-post-training reference 8.3, 8.6)."""

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


READ_BY = {
    "adam": {"beta1", "beta2", "eps"},
    "sgd": {"momentum"},
}
"""Options that only some optimizers read."""


def options_of_others(draft: Draft) -> Iterator[Problem]:
    """An option of another optimizer does nothing."""
    name = draft.get("optimizer.name")
    for other, keys in READ_BY.items():
        for key in sorted(keys - READ_BY[name]):
            if draft.changed(f"optimizer.{key}"):
                yield Problem(
                    f"optimizer.{key}",
                    f"is not used: optimizer.name is {name!r}, and {other!r} reads it",
                    "warning",
                )


SMALLEST_EPS = 1e-4
"""In float16, AdamW's second moment is 0 for gradients below 8e-3: eps alone divides them then."""


def narrow_masters(draft: Draft) -> Iterator[Problem]:
    """Weights in 16 bits must be what the forward pass computes in, and lose small updates."""
    master, forward = draft.get("train.master_dtype"), draft.get("train.forward_dtype")
    if master == "fp32":
        return
    if master != forward:
        yield Problem(
            "train.master_dtype",
            f"must be 'fp32' or train.forward_dtype = {forward!r}, got {master!r}",
        )
        return
    eps = draft.get("optimizer.eps")
    if master == "fp16" and draft.get("optimizer.name") == "adam" and eps < SMALLEST_EPS:
        yield Problem(
            "optimizer.eps",
            f"must be at least {SMALLEST_EPS:g} with train.master_dtype 'fp16', got {eps:g}: the second "
            "moment of small gradients is 0 there, and a smaller eps too",
        )
    # half the distance of two neighbours, as a share of the smaller one
    share = 512 if master == "bf16" else 4096
    lr = draft.get("optimizer.lr")
    yield Problem(
        "train.master_dtype",
        f"{master!r} loses updates below 1/{share} of a weight: at optimizer.lr = {lr:g} weights "
        f"above about {share * lr:.2g} do not move; 'fp32' keeps every update",
        "warning",
    )


OPTIMIZER_RULES = (
    order_of_rates,
    warmup_before_end,
    tail_of_wsd,
    options_of_others,
    narrow_masters,
)
