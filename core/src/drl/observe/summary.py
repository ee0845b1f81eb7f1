"""``summary.json``: the result of a run in figures, and the sentences that state it.

A score is only worth what its conditions say, so every held-out figure carries its counts and a
sentence that names the sampler; figures of different samplers are never compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.errors import RewardError
from drl.observe.directory import RunDirectory
from drl.observe.files import append_json_line, read_json_lines, write_json_atomic

if TYPE_CHECKING:
    from drl.interfaces.updater import PushReport
    from drl.types import ParityReport, Sample, Sampling

BOOTSTRAP_SEED = 0
"""Fixed, so that the same scores give the same interval whatever the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """Held-out reward before and after, the same noise on both sides.

    ``difference`` is after minus before, ``ci_low`` and ``ci_high`` its 95 % bootstrap interval over
    words; ``images``: pairs compared, ``failed``: pairs left out because a score failed.
    """

    before: float
    after: float
    difference: float
    ci_low: float
    ci_high: float
    images: int
    words: int
    sampler: str
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Rollout against trainer before the first step: max |difference of log-probs| per denoising step."""

    by_step: Mapping[int, float]
    rows: int
    worst: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTotals:
    """All pushes of a run; ``ok`` is False when one of them was not proved, ``checksum`` the last one's."""

    pushes: int
    ok: bool
    bytes: int
    seconds: float
    version: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What ``summary.json`` holds. ``status``: "finished", "interrupted" or "failed".

    ``train_seconds`` leaves evaluations out. ``heldout_rollout_sampler``: the same held-out comparison
    under the noisy sampler that rollouts use. ``unproven``: settings the engine could not confirm.
    """

    heldout: Heldout | None
    train_seconds: float
    seed: int
    iterations: int
    images_seen: int
    heldout_rollout_sampler: Heldout | None = None
    parity: Parity | None = None
    sync: SyncTotals | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    unproven: tuple[str, ...] = ()
    status: str = "finished"


def write_summary(directory: RunDirectory, summary: Summary) -> None:
    """Write ``summary.json`` in one step."""
    write_json_atomic(directory.summary, summary)


def pair_samples(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pair samples of the same data row and seed, in the order of ``before``.

    ValueError when a key occurs twice or one side lacks it: then the noise was not the same.
    """
    old = {(sample.prompt.row, sample.seed): sample for sample in before}
    new = {(sample.prompt.row, sample.seed): sample for sample in after}
    unpaired = sorted(old.keys() ^ new.keys())
    if unpaired or len(old) != len(before) or len(new) != len(after):
        raise ValueError(
            "evaluations before and after must hold each (row, seed) once on both sides; "
            f"got {len(before)} and {len(after)} samples, unpaired: {unpaired[:5]}"
        )
    return [(sample, new[key]) for key, sample in old.items()]


def compare(before: Sequence[Sample], after: Sequence[Sample], *, sampler: str) -> Heldout:
    """Return means, difference and interval of two evaluations with the same rows, seeds and sampler.

    Scores of one prompt text are one word of the bootstrap. A pair with a failed score is left out
    and counted; RewardError when no pair is left.
    """
    from drl.mathematics.statistics import bootstrap_interval  # imports torch

    old: dict[str, list[float]] = {}
    new: dict[str, list[float]] = {}
    pairs = pair_samples(before, after)
    for first, second in pairs:
        if first.reward is not None and second.reward is not None:
            old.setdefault(first.prompt.text, []).append(first.reward)
            new.setdefault(first.prompt.text, []).append(second.reward)
    images = sum(map(len, old.values()))
    if images == 0:
        raise RewardError(
            f"none of {len(pairs)} held-out samples has a valid score both before and after; "
            "look at the reward's own failures in the log"
        )
    interval = bootstrap_interval(old, new, seed=BOOTSTRAP_SEED)
    return Heldout(
        before=sum(map(sum, old.values())) / images,
        after=sum(map(sum, new.values())) / images,
        difference=interval.difference,
        ci_low=interval.low,
        ci_high=interval.high,
        images=images,
        words=len(old),
        sampler=sampler,
        failed=len(pairs) - images,
    )


def sampler_sentence(sampling: Sampling, seeds: Iterable[int]) -> str:
    """Name everything a score hangs on: ``euler ODE, 8 steps, guidance 1, 48x16, seeds 42..45``."""
    kind = (
        "euler ODE"
        if sampling.sde_type == "ode"
        else f"{sampling.sde_type} noise {sampling.noise_level:g}"
    )
    parts = [kind, f"{sampling.num_steps} steps", f"guidance {sampling.guidance_scale:g}"]
    optional = {
        "second guidance": sampling.guidance_scale_2,
        "true guidance": sampling.true_cfg_scale,
        "shift": sampling.flow_shift,
    }
    parts += [f"{name} {value:g}" for name, value in optional.items() if value is not None]
    size = f"{sampling.width}x{sampling.height}"
    parts.append(size if sampling.num_frames == 1 else f"{size}x{sampling.num_frames} frames")
    if sampling.guided and sampling.negative_prompt:
        parts.append(f"negative prompt {sampling.negative_prompt!r}")
    return ", ".join([*parts, _seed_words(sorted(set(seeds)))])


def _seed_words(seeds: Sequence[int]) -> str:
    if not seeds:
        return "no seeds"
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]}..{seeds[-1]}"
    shown = " ".join(map(str, seeds[:4]))
    return f"seeds {shown}" + (f" and {len(seeds) - 4} more" if len(seeds) > 4 else "")


def parity_summary(report: ParityReport, limit: float) -> Parity:
    """Return the parity report with the limit it was held against (``trust.max_log_prob_diff``)."""
    return Parity(by_step=report.by_step, rows=report.rows, worst=report.worst, limit=limit)


def parity_metrics(report: ParityReport) -> dict[str, float]:
    """Return the parity report as figures: ``trust/parity_step_<k>`` and ``trust/parity_worst``."""
    by_step = {f"trust/parity_step_{step}": value for step, value in report.by_step.items()}
    return by_step | {"trust/parity_worst": report.worst}


def parity_steps(figures: Mapping[str, float]) -> dict[int, float]:
    """Return the differences per denoising step out of one row of figures."""
    found = {
        re.fullmatch(r"trust/parity_step_(\d{1,6})", name): value for name, value in figures.items()
    }
    return {int(match[1]): value for match, value in found.items() if match}


def record_push(directory: RunDirectory, report: PushReport, verdict: str) -> None:
    """Add one push to ``sync.jsonl``; ``verdict`` says what was proved ("checksum equal" …).

    Missing or unexpected names make the push not ok and take the verdict's place.
    """
    ok = not report.missing and not report.unexpected
    if not ok:
        verdict = f"{len(report.missing)} names missing, {len(report.unexpected)} unexpected"
    row = {
        "version": report.version,
        "component": report.component,
        "tensors": len(report.names),
        "buckets": report.buckets,
        "bytes": report.bytes,
        "seconds": round(report.seconds, 6),
        "checksum": report.checksum,
        "ok": ok,
        "verdict": verdict,
    }
    append_json_line(directory.sync, row)


def sync_totals(directory: RunDirectory) -> SyncTotals | None:
    """Return the totals of ``sync.jsonl``, also over resumes; None when nothing was pushed."""
    rows = read_json_lines(directory.sync)[0] if directory.sync.is_file() else []
    if not rows:
        return None
    return SyncTotals(
        pushes=len(rows),
        ok=all(row["ok"] for row in rows),
        bytes=sum(row["bytes"] for row in rows),
        seconds=sum(row["seconds"] for row in rows),
        version=rows[-1]["version"],
        checksum=rows[-1]["checksum"],
    )


def headline(heldout: Heldout) -> str:
    """State a result in one line: values, interval, counts, sampler."""
    return (
        f"held-out reward {heldout.before:.3f} -> {heldout.after:.3f} "
        f"({heldout.difference:+.3f}, 95 % interval {heldout.ci_low:+.3f} to {heldout.ci_high:+.3f}; "
        f"{heldout.images} images of {heldout.words} words; {heldout.sampler})"
    )


def verdict(low: float, high: float) -> str:
    """Say what an interval of a difference allows to claim."""
    if low > 0:
        return "better: the interval lies above 0"
    if high < 0:
        return "worse: the interval lies below 0"
    return "no change shown: the interval holds 0"
