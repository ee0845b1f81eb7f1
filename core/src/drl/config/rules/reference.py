"""Rules of what a policy is compared with: a reference, an old policy (rl-post-training reference 4.5)."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import needs
from drl.config.draft import Draft
from drl.errors import Problem

KL, MODE = "algorithm.kl_beta", "algorithm.ref_mode"


def reference_of_the_loss(draft: Draft) -> Iterator[Problem]:
    """A KL term and some losses need a reference: adapters to switch off, or an average of the weights.

    Where a loss compares with an old policy, the average is that one, and no reference.
    """
    loss, mode, beta = draft.get("algorithm.loss"), draft.get(MODE), _kl_beta(draft)
    if mode == "none" and needs(draft, "reference"):
        yield Problem(
            MODE,
            f"is 'none', but algorithm.loss {loss!r} compares with a reference: use 'lora_base' with "
            "lora.enabled = true, or 'ema' with ema.enabled = true",
        )
    elif mode == "none" and beta > 0:
        others = "'lora_base'" if needs(draft, "old_prediction") else "'lora_base' or 'ema'"
        yield Problem(
            MODE, f"is 'none', but algorithm.kl_beta = {beta} needs a reference; use {others}"
        )
    elif mode == "lora_base" and not draft.get("lora.enabled"):
        other = "algorithm.kl_beta = 0" if needs(draft, "old_prediction") else f"{MODE} = 'ema'"
        yield Problem(
            MODE if draft.given(MODE) else KL,
            "needs the reference 'lora_base', which is the model without its adapter: "
            f"set lora.enabled = true, or {other}",
        )
    elif mode == "ema" and needs(draft, "old_prediction") and beta > 0:
        yield Problem(
            KL,
            f"is {beta}, but the average (algorithm.ref_mode = 'ema') is the old policy that "
            f"algorithm.loss {loss!r} compares with already; a KL term needs a "
            "reference of its own: use 'lora_base', or set it to 0",
        )


def reference_without_use(draft: Draft) -> Iterator[Problem]:
    """A reference that nothing reads, and a KL weight without a KL term, do nothing."""
    loss, mode = draft.get("algorithm.loss"), draft.get(MODE)
    if needs(draft, "reference"):
        return
    if draft.get(KL) > 0 and not needs(draft, "rollout"):
        yield Problem(KL, f"is not used: algorithm.loss {loss!r} has no KL term", "warning")
    if mode == "none" or _kl_beta(draft) > 0 or not draft.given(MODE):
        return
    if needs(draft, "old_prediction"):
        if mode == "lora_base" and draft.get("lora.enabled"):
            old = (
                "the average of the weights" if draft.get("ema.enabled") else "those of its rollout"
            )
            yield Problem(
                MODE,
                f"is not used: algorithm.kl_beta is 0, and the weights that algorithm.loss {loss!r} takes for "
                f"the old policy are {old} (ema.enabled)",
                "warning",
            )
    elif mode == "ema" or draft.get("lora.enabled"):
        reason = (
            f"{KL} is 0" if needs(draft, "rollout") else f"algorithm.loss {loss!r} has no KL term"
        )
        yield Problem(MODE, f"is not used: {reason}", "warning")


def start_of_the_reference(draft: Draft) -> Iterator[Problem]:
    """A run that starts from an adapter is away from its own reference at the first step."""
    start, mode = draft.get("lora.adapter_path"), draft.get(MODE)
    used = needs(draft, "reference") or _kl_beta(draft) > 0
    if start is not None and mode == "lora_base" and used and draft.get("lora.enabled"):
        yield Problem(
            MODE,
            "'lora_base' is the model without any adapter, also without the one of lora.adapter_path: the "
            "run starts away from it; to hold on to the adapter, merge it first (drl export --format merged)",
            "warning",
        )


def _kl_beta(draft: Draft) -> float:
    """Return the weight of the KL term, 0 where the loss has no such term."""
    beta: float = draft.get(KL)
    return beta if needs(draft, "rollout") else 0.0


REFERENCE_RULES = (reference_of_the_loss, reference_without_use, start_of_the_reference)
