"""The trainer's log-probs of recorded steps beside the engine's, before the weights have moved.

Everything is computed first and read once, so the device is never waited for between micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from drl.errors import ContractError
from drl.stages.loss import OLD, Forward, score_pairs, value_of
from drl.stages.totals import larger
from drl.types import Pair, ParityReport, Shard, StepContext


@torch.no_grad()
def log_probs(forward: Forward, batches: Sequence[tuple[Sequence[Pair], StepContext]]) -> Tensor:
    """Return the log-prob of every pair under the present weights, ``(N,)`` float32 on the CPU."""
    scores = []
    for pairs, context in batches:
        scored = score_pairs(forward, pairs, context)
        if scored is None:
            raise ContractError("only losses that need a transition score recorded steps")
        scores.append(scored.joint_log_prob)
    return torch.cat(scores).cpu() if scores else torch.zeros(0)


def compared(
    forward: Forward, batches: Sequence[tuple[Sequence[Pair], StepContext]]
) -> ParityReport:
    """Return |trainer - engine| log-prob of the pairs that weigh something, by denoising step."""
    pairs = [pair for batch, _ in batches for pair in batch]
    old = torch.tensor([value_of(pair, OLD) for pair in pairs], dtype=torch.float32)
    gaps = (log_probs(forward, batches) - old).abs().tolist()
    by_step: dict[int, list[float]] = defaultdict(list)
    for pair, gap in zip(pairs, gaps, strict=True):
        if pair.weight:
            by_step[int(pair.values.get("step", pair.id[-1]))].append(gap)
    steps = sorted(by_step)
    worst = {step: by_step[step][0] for step in steps}
    for step in steps:
        for gap in by_step[step]:
            worst[step] = larger(worst[step], gap)
    return ParityReport(
        by_step=worst,
        rows=sum(len(gaps) for gaps in by_step.values()),
        mean_by_step={step: sum(by_step[step]) / len(by_step[step]) for step in steps},
        rows_by_step={step: len(by_step[step]) for step in steps},
    )


def joined(reports: Sequence[ParityReport]) -> ParityReport:
    """Return the parity of all ranks: of each step the worst difference, and the mean over all rows."""
    worst: dict[int, float] = {}
    sums: dict[int, float] = defaultdict(float)
    rows: dict[int, int] = defaultdict(int)
    for report in reports:
        for step, gap in report.by_step.items():
            worst[step] = larger(worst.get(step, gap), gap)
        for step, mean in report.mean_by_step.items():
            sums[step] += mean * report.rows_by_step[step]
            rows[step] += report.rows_by_step[step]
    return ParityReport(
        by_step=dict(sorted(worst.items())),
        rows=sum(report.rows for report in reports),
        mean_by_step={step: sums[step] / rows[step] for step in sorted(sums)},
        rows_by_step=dict(sorted(rows.items())),
    )


def batches_of(
    shard: Shard, contexts: Sequence[StepContext]
) -> list[tuple[Sequence[Pair], StepContext]]:
    """Return every micro-batch of a shard with the context of its window."""
    return [
        (pairs, context)
        for window, context in zip(shard.windows, contexts, strict=True)
        for pairs in window
    ]
