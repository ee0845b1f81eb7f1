"""The end of a run: trained weights, summary.json, report.html, and the last lines a person reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from drl.observe.metrics import read_metrics
from drl.observe.report import write_report
from drl.observe.summary import (
    Heldout,
    Summary,
    compare,
    headline,
    parity_summary,
    sampler_sentence,
    sync_totals,
    write_summary,
)
from drl.observe.versions import versions
from drl.stages.evaluate import AFTER, BEFORE, NOISY
from drl.stages.rollout import evaluation_sampling, training_sampling
from drl.stages.trust import unproven_settings
from drl.types import Prompt, Sample

if TYPE_CHECKING:
    from drl.run import Run


def finish(run: Run) -> list[str]:
    """Write what a finished run leaves behind; return the closing lines."""
    run.save_adapter()
    weights = run.trainer.write_weights(run.directory.path / "model")
    summary = summarize(run)
    write_summary(run.directory, summary)
    report = write_report(run.directory.path)
    lines = [headline(summary.heldout)] if summary.heldout else []
    if summary.heldout_rollout_sampler:
        noisy = headline(summary.heldout_rollout_sampler)
        lines.append(f"under the rollout's own sampler: {noisy}")
    lines += [f"report   {report}"]
    if run.directory.adapter.is_dir():
        lines.append(f"adapter  {run.directory.adapter}")
    return [*lines, *(f"weights  {path}" for path in weights)]


def summarize(run: Run) -> Summary:
    """Gather the result of the run; what did not take place is None."""
    limit = run.recipe.trust.max_log_prob_diff
    return Summary(
        heldout=heldout(run, ""),
        heldout_rollout_sampler=heldout(run, f"/{NOISY}"),
        train_seconds=train_seconds(run),
        seed=run.recipe.train.seed,
        iterations=run.trainer.next_rollout,
        images_seen=run.counters.images_seen,
        parity=None if run.parity is None else parity_summary(run.parity, limit),
        sync=sync_totals(run.directory),
        versions=versions(run.catalog.distributions),
        unproven=unproven(run),
    )


def train_seconds(run: Run) -> float:
    """Return the time of all iterations, also of those before a resume; 0 without the logger ``jsonl``."""
    rows = run.directory.metrics
    return read_metrics(rows).train_seconds() if rows.is_file() else 0.0


def unproven(run: Run) -> tuple[str, ...]:
    """Name the settings that no engine of the run can confirm."""
    if run.engines is None:
        return ()
    return tuple(unproven_settings(run.engines.engine.capabilities().echoes))


def heldout(run: Run, suffix: str) -> Heldout | None:
    """Compare the first evaluation set before and after; None when one of them is missing."""
    if not run.evaluation_sets:
        return None
    name = run.evaluation_sets[0].name + suffix
    before, after = (stored_samples(run, label, name) for label in (BEFORE, AFTER))
    if not before or not after:
        return None
    sampling = training_sampling(run.recipe) if suffix else evaluation_sampling(run.recipe)
    sentence = sampler_sentence(sampling, {sample.seed for sample in after})
    if run.recipe.ema.rollout_policy == "ema":
        sentence += ", moving average of the weights"
    return compare(before, after, sampler=sentence)


def stored_samples(run: Run, label: str, name: str) -> list[Sample]:
    """Read the rows of an evaluation back; before and after may lie in different processes."""
    file = run.evaluations / f"{label}.json"
    if not file.is_file():
        return []
    return [
        Sample(
            index=number,
            group_index=number,
            member=row["member"],
            prompt=Prompt(row=row["row"], text=row["prompt"]),
            seed=row["seed"],
            reward=row["reward"],
        )
        for number, row in enumerate(json.loads(file.read_text())["rows"])
        if row["set"] == name
    ]
