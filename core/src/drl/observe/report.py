"""``write_report``: everything a run directory holds, as one HTML file that needs nothing else.

The file has no scripts and may load nothing (its content security policy says so); prompts and all
other text are escaped by the template engine. A run that is unfinished or has lost files still gets
a report, which names what is absent.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from drl.observe.chart import HEIGHT, WIDTH, Chart
from drl.observe.curves import (
    ROLLOUT_SAMPLER,
    Panel,
    PhaseTime,
    evaluation_names,
    panels,
    phase_times,
)
from drl.observe.directory import RunDirectory
from drl.observe.files import number, read_json_lines, write_text_atomic
from drl.observe.gallery import Gallery, load_gallery
from drl.observe.lanes import Lanes, draw_lanes, read_timelines
from drl.observe.metrics import Metrics, read_metrics
from drl.observe.performance import Figure, memory_panel, speed
from drl.observe.summary import parity_steps, verdict
from drl.observe.timing import Timeline

MOST_PUSHES = 12
NEWEST_PUSHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A held-out comparison as the headline shows it."""

    title: str
    before: float
    after: float
    difference: float
    ci_low: float
    ci_high: float
    images: int
    words: int
    failed: int
    sampler: str
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One denoising step of the parity table."""

    step: int
    difference: float
    passed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that the template draws; ``missing`` and ``remarks`` say what could not be shown."""

    name: str
    status: str
    facts: tuple[tuple[str, str], ...]
    results: tuple[Result, ...]
    panels: tuple[Panel, ...]
    gallery: Gallery
    parity: tuple[ParityRow, ...]
    parity_limit: float | None
    pushes: tuple[Mapping[str, Any], ...]
    push_count: int
    unproven: tuple[str, ...] | None
    phases: tuple[PhaseTime, ...]
    phase_chart: Chart | None
    speed: tuple[Figure, ...]
    memory: Panel | None
    lanes: Lanes | None
    packages: tuple[tuple[str, str], ...]
    components: tuple[Mapping[str, Any], ...]
    recipe: str
    missing: tuple[str, ...]
    remarks: tuple[str, ...]


class _Files:
    """Reads the files of a run and notes which are absent or damaged."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.missing: list[str] = []
        self.remarks: list[str] = []

    def text(self, path: Path) -> str:
        """Return the text of a file, "" when absent."""
        if not path.is_file():
            self.missing.append(path.name)
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

    def mapping(self, path: Path) -> Mapping[str, Any]:
        """Return a JSON object, {} when absent or damaged."""
        text = self.text(path)
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.remarks.append(f"{path.name} is no JSON object; it was left out")
            return {}
        return value

    def recipe(self) -> tuple[str, Mapping[str, Any]]:
        """Return the recipe's text and its tables."""
        text = self.text(self.directory.recipe)
        try:
            return text, tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError):
            self.remarks.append("recipe.toml is not valid TOML; it is shown as it is")
            return text, {}

    def metrics(self) -> Metrics:
        """Return the figures, none when absent."""
        if not self.directory.metrics.is_file():
            self.missing.append(self.directory.metrics.name)
            return Metrics()
        metrics = read_metrics(self.directory.metrics)
        self.remarks += metrics.remarks
        return metrics

    def timelines(self) -> dict[int, Timeline]:
        """Return the timelines of the iterations; a run need not have any."""
        found, remarks = read_timelines(self.directory.path)
        self.remarks += remarks
        return found

    def pushes(self) -> list[dict[str, Any]]:
        """Return the rows of pushes, none when absent."""
        if not self.directory.sync.is_file():
            self.missing.append(self.directory.sync.name)
            return []
        rows, remarks = read_json_lines(self.directory.sync)
        self.remarks += remarks
        return rows


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    RunDirectoryError when ``run_dir`` is none. Takes no lock: it reads a run that is still going too.
    """
    directory = RunDirectory.open(run_dir)
    template = _environment().get_template("report.html.j2")
    text = template.render(view=gather(directory), width=WIDTH, height=HEIGHT)
    write_text_atomic(directory.report, text)
    return directory.report


def gather(directory: RunDirectory) -> View:
    """Read a run directory into what the report shows."""
    files = _Files(directory)
    recipe_text, recipe = files.recipe()
    metrics = files.metrics()
    summary = files.mapping(directory.summary)
    plugins = files.mapping(directory.plugins)
    pushes = files.pushes()
    gallery = load_gallery(directory.samples)
    results = _results(summary)
    times, chart = phase_times(metrics)
    order = [time.name for time in times]
    limit = _limit(summary, recipe)
    return View(
        name=_name(directory, recipe),
        status=str(summary.get("status", "finished")) if summary else "unfinished",
        facts=_facts(summary, metrics),
        results=results,
        panels=tuple(panels(metrics, _samplers(summary, metrics))),
        gallery=gallery,
        parity=_parity(summary, metrics, limit),
        parity_limit=limit,
        pushes=tuple(_shown_pushes(pushes)),
        push_count=len(pushes),
        unproven=_unproven(summary),
        phases=tuple(times),
        phase_chart=chart,
        speed=tuple(speed(metrics)),
        memory=memory_panel(metrics, order),
        lanes=draw_lanes(files.timelines(), order),
        packages=_packages(plugins),
        components=tuple(row for row in _list(plugins, "components") if isinstance(row, dict)),
        recipe=recipe_text,
        missing=tuple(files.missing),
        remarks=(*files.remarks, *gallery.remarks),
    )


@cache
def _environment() -> Environment:
    """Return what the templates need; it keeps them compiled."""
    environment = Environment(
        loader=PackageLoader("drl.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size_words, "duration": duration_words, "figure": figure_words}
    return environment


def size_words(value: object) -> str:
    """Write a number of bytes: 512 B, 1.5 MB; anything else is ``?``."""
    count = number(value)
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_words(value: object) -> str:
    """Write seconds: 0.25 s, 42 s, 3 min 05 s, 2 h 10 min; anything else is ``?``."""
    seconds = number(value)
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def figure_words(value: object) -> str:
    """Write a float with four digits, anything else as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(directory: RunDirectory, recipe: Mapping[str, Any]) -> str:
    name = _mapping(recipe, "run").get("name")
    return f"{name} · {directory.name}" if isinstance(name, str) else directory.name


def _facts(summary: Mapping[str, Any], metrics: Metrics) -> tuple[tuple[str, str], ...]:
    """Return the line of facts under the title, from the summary or else from the figures."""
    seen = max(metrics.images_seen().values(), default=0.0)
    iterations = sum(1 for step in metrics.rows if step >= 0)
    seconds = number(summary.get("train_seconds")) or metrics.train_seconds()
    facts = [
        ("iterations", figure_words(summary.get("iterations", iterations))),
        ("images seen", figure_words(summary.get("images_seen", int(seen)))),
        ("training time, evaluations apart", duration_words(seconds)),
    ]
    if "seed" in summary:
        facts.append(("seed", figure_words(summary["seed"])))
    return tuple(facts)


def _results(summary: Mapping[str, Any]) -> tuple[Result, ...]:
    titles = {
        "heldout": "Held-out reward",
        "heldout_rollout_sampler": "Held-out reward, rollout's own sampler",
    }
    found = [_result(title, _mapping(summary, key)) for key, title in titles.items()]
    return tuple(result for result in found if result is not None)


def _result(title: str, heldout: Mapping[str, Any]) -> Result | None:
    keys = ("before", "after", "difference", "ci_low", "ci_high")
    found = {key: value for key in keys if (value := number(heldout.get(key))) is not None}
    if len(found) < len(keys):
        return None
    return Result(
        title=title,
        before=found["before"],
        after=found["after"],
        difference=found["difference"],
        ci_low=found["ci_low"],
        ci_high=found["ci_high"],
        images=_count(heldout, "images"),
        words=_count(heldout, "words"),
        failed=_count(heldout, "failed"),
        sampler=str(heldout.get("sampler", "sampler not recorded")),
        verdict=verdict(found["ci_low"], found["ci_high"]),
    )


def _samplers(summary: Mapping[str, Any], metrics: Metrics) -> dict[str, str]:
    """Return the sampler's sentence by figure; the summary's comparisons are of the first set."""
    names = evaluation_names(metrics)
    if not names:
        return {}
    keys = {"heldout": names[0], "heldout_rollout_sampler": f"{names[0]}/{ROLLOUT_SAMPLER}"}
    return {name: str(_mapping(summary, key).get("sampler", "")) for key, name in keys.items()}


def _limit(summary: Mapping[str, Any], recipe: Mapping[str, Any]) -> float | None:
    recorded = number(_mapping(summary, "parity").get("limit"))
    return (
        recorded
        if recorded is not None
        else number(_mapping(recipe, "trust").get("max_log_prob_diff"))
    )


def _parity(
    summary: Mapping[str, Any], metrics: Metrics, limit: float | None
) -> tuple[ParityRow, ...]:
    """Return the table per denoising step, from the summary or else from the first row that has it."""
    recorded = _mapping(_mapping(summary, "parity"), "by_step")
    by_step = {
        int(step): value
        for step, entry in recorded.items()
        if step.isdecimal() and len(step) < 7 and (value := number(entry)) is not None
    }
    if not by_step:
        by_step = next((found for row in metrics.rows.values() if (found := parity_steps(row))), {})
    return tuple(
        ParityRow(step=step, difference=value, passed=None if limit is None else value <= limit)
        for step, value in sorted(by_step.items())
    )


def _shown_pushes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the first and the newest pushes, and each that was not proved."""
    if len(rows) <= MOST_PUSHES:
        return rows
    bad = [row for row in rows[1:-NEWEST_PUSHES] if row.get("ok") is not True]
    return [rows[0], *bad[:MOST_PUSHES], *rows[-NEWEST_PUSHES:]]


def _unproven(summary: Mapping[str, Any]) -> tuple[str, ...] | None:
    return tuple(map(str, _list(summary, "unproven"))) if "unproven" in summary else None


def _packages(plugins: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    platform = [
        (key, str(plugins[key]))
        for key in ("python", "implementation", "system", "machine", "cpus")
        if key in plugins
    ]
    packages = _mapping(plugins, "packages").items()
    return (*platform, *((str(name), str(version)) for name, version in packages))


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    value = values.get(key)
    return value if isinstance(value, list) else []


def _count(values: Mapping[str, Any], key: str) -> int:
    return int(number(values.get(key)) or 0)
