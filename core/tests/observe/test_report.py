from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from drl.errors import RunDirectoryError
from drl.interfaces.updater import PushReport
from drl.observe.directory import RunDirectory
from drl.observe.files import append_json_line, write_json_atomic, write_text_atomic
from drl.observe.pictures import save_samples
from drl.observe.report import duration_words, size_words, write_report
from drl.observe.summary import (
    Summary,
    compare,
    parity_summary,
    record_push,
    sync_totals,
    write_summary,
)
from drl.observe.versions import versions
from drl.types import ParityReport, Sample

Make = Callable[..., Sample]
SAMPLER = "euler ODE, 8 steps, guidance 1, 48x16, seeds 42..43"
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e'
VOID = {"meta", "img", "input", "br", "link"}


class Page(HTMLParser):
    """A strict reader: every tag is closed in order; keeps tags with attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def row_of(step: int, **changed: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "time": 1e9 + step,
        "rollout/reward/raw_mean": 0.5 + 0.01 * step,
        "rollout/reward/raw_std": 0.25,
        "rollout/reward/raw_num_samples": 64,
        "train/ratio_abs_minus_1": 1e-4,
        "train/clipfrac": 0.01,
        "train/loss": -0.001,
        "train/grad_norm": 0.5,
        "perf/rollout_time": 2.0,
        "perf/train_time": 1.0,
        "perf/unaccounted_time": 0.1,
        "perf/step_time": 3.1,
    }
    return row | changed


def evaluation(make: Make, level: float, text: str = "sign") -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        make(
            row=row,
            text=f"{text} {row}",
            seed=42 + place,
            member=place,
            reward=level,
            pixels=torch.rand(3, 1, 16, 48, generator=generator),
        )
        for row in range(20)
        for place in range(2)
    ]


def fill(run: RunDirectory, make: Make, text: str = "sign") -> None:
    """Write what a finished run of five iterations leaves behind."""
    before, after = evaluation(make, 0.25, text), evaluation(make, 0.75, text)
    write_text_atomic(run.recipe, '[run]\nname = "glyphs"\n\n[trust]\nmax_log_prob_diff = 1e-5\n')
    components = [
        {"kind": "reward", "name": "ocr", "distribution": "drl-reward-ocr", "version": "1"}
    ]
    write_json_atomic(run.plugins, versions([("drl-reward-ocr", "1")], components))
    for step in range(5):
        extra = {"eval/heldout": 0.3 + 0.1 * step, "perf/eval_time": 0.5} if step in (0, 4) else {}
        append_json_line(run.metrics, row_of(step, **extra))
    for version in range(5):
        record_push(run, push(version), "checksum equal")
    save_samples(run.samples / "before", before, rows=20)
    save_samples(run.samples / "after", after, rows=20)
    save_samples(run.samples / "step_0000004", after[:6], rows=2)
    summary = Summary(
        heldout=compare(before, after, sampler=SAMPLER),
        heldout_rollout_sampler=compare(before, before, sampler="cps noise 0.7, 8 steps"),
        train_seconds=125.0,
        seed=7,
        iterations=5,
        images_seen=320,
        parity=parity_summary(ParityReport(by_step={0: 0.0, 1: 2e-5}, rows=64), limit=1e-5),
        sync=sync_totals(run),
        unproven=("guidance_scale",),
    )
    write_summary(run, summary)


def push(version: int, missing: tuple[str, ...] = ()) -> PushReport:
    return PushReport(
        version=version,
        component="transformer",
        names=("a", "b", "c"),
        buckets=1,
        bytes=9_500_000,
        checksum=f"{version:02x}" * 32,
        missing=missing,
        seconds=0.25,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, make_sample: Make) -> RunDirectory:
    """A finished run that tests copy before they change it."""
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "glyphs", now=1e9)
    fill(run, make_sample)
    return run


@pytest.fixture
def run(finished: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(finished.path, tmp_path / "glyphs-run")))


def page_of(run: RunDirectory) -> Page:
    return Page(write_report(run.path).read_text(encoding="utf-8"))


def test_the_report_is_one_small_file_that_loads_nothing(run: RunDirectory) -> None:
    path = write_report(run.path)
    assert path == run.report
    assert path.stat().st_size < 2_000_000
    page = Page(path.read_text())
    assert page.named("script") == []
    assert page.named("link") == []
    sources = [attributes["src"] or "" for attributes in page.named("img")]
    assert sources
    assert all(source.startswith("data:image/") for source in sources)
    policy = [meta["content"] for meta in page.named("meta") if "http-equiv" in meta]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert "url(" not in path.read_text()
    assert "@import" not in path.read_text()


def test_the_headline_gives_both_samplers_with_interval_counts_and_claim(run: RunDirectory) -> None:
    text = page_of(run).text
    assert "0.250 → 0.750" in text
    assert "+0.500, 95 % interval +0.500 to +0.500" in text
    assert "better: the interval lies above 0" in text
    assert f"40 images of 20 words, same noise before and after. Sampler: {SAMPLER}." in text
    assert "Held-out reward, rollout's own sampler 0.250 → 0.250" in text
    assert "no change shown: the interval holds 0" in text
    assert "5 iterations 320 images seen 2 min 05 s training time, evaluations apart 7 seed" in text


def test_reward_spread_and_held_out_reward_are_the_first_curves_of_a_short_run(
    run: RunDirectory,
) -> None:
    page = page_of(run)
    text = page.text
    titles = ["Training reward", "Held-out reward: heldout", "Ratio from 1", "Clip share", "Loss"]
    places = [text.index(f"{title} last") for title in titles]
    assert places == sorted(places)
    assert len(page.named("polygon")) == 2  # the band of the reward, over both axes


def test_the_value_in_the_report_is_the_value_in_the_log_with_its_unit(run: RunDirectory) -> None:
    text = page_of(run).text
    assert "Training reward last 0.54 reward, mean ± standard deviation over samples" in text
    assert "Held-out reward: heldout last 0.7 reward, mean over samples" in text
    assert f"eval/heldout ; {SAMPLER}" in text
    assert "Gradient norm last 0.5 L2 norm before clipping" in text


def test_curves_run_over_iterations_and_over_images_seen(run: RunDirectory) -> None:
    page = page_of(run)
    labels = [svg["aria-label"] or "" for svg in page.named("svg")]
    over_iterations = [text for text in labels if text.endswith("over iteration")]
    over_images = [text for text in labels if text.endswith("over images seen")]
    assert len(over_images) == 6
    assert len(over_iterations) == len(over_images) + 1  # the phase times have one axis
    assert "64" not in labels
    assert "300" in page.text  # a tick of the images axis, which ends at 320


def test_inner_updates_are_lines_of_their_own(run: RunDirectory) -> None:
    extra = {"train/ratio_abs_minus_1/update_0": 0.0, "train/ratio_abs_minus_1/update_1": 1e-3}
    append_json_line(run.metrics, row_of(5, **extra))
    append_json_line(run.metrics, row_of(6, **extra))
    assert "update 0 update 1" in page_of(run).text


def test_reward_terms_are_drawn_only_when_there_are_several(run: RunDirectory) -> None:
    append_json_line(run.metrics, row_of(5, **{"rollout/reward/ocr_mean": 0.5}))
    assert "Reward term" not in page_of(run).text
    append_json_line(run.metrics, row_of(5, **{"rollout/reward/jpeg_mean": 0.5}))
    text = page_of(run).text
    assert "Reward term ocr" in text
    assert "Reward term jpeg" in text


def test_pairs_show_the_same_seed_and_say_how_they_were_picked(run: RunDirectory) -> None:
    page = page_of(run)
    assert "24 of 40 pairs, evenly picked by their order in the data" in page.text
    assert len([image for image in page.named("img") if image["alt"] == "before"]) == 24
    assert "sign 0 0.25 → 0.75, seed 42" in page.text
    shown = next(image for image in page.named("img"))
    assert (shown["width"], shown["height"]) == ("144", "48")


def test_pairs_are_matched_by_row_and_seed_not_by_place(run: RunDirectory) -> None:
    index = run.samples / "after" / "samples.json"
    entries = json.loads(index.read_text())
    entries.reverse()
    for entry in entries:
        entry["reward"] = entry["row"] / 100 + (entry["seed"] - 42) / 1000
    write_json_atomic(index, entries[:-1])
    page = page_of(run)
    assert "24 of 39 pairs" in page.text
    assert "sign 19 0.25 → 0.19, seed 42" in page.text


def test_the_parity_table_holds_every_step_against_the_limit(run: RunDirectory) -> None:
    text = page_of(run).text
    assert "max |Δ log-prob| 0 0 within limit 1 2e-05 above limit" in text
    assert "Limit trust.max_log_prob_diff : 1e-05" in text


def test_parity_and_limit_of_an_unfinished_run_come_from_figures_and_recipe(
    run: RunDirectory,
) -> None:
    run.summary.unlink()
    append_json_line(
        run.metrics, row_of(0, **{"trust/parity_step_0": 0.0, "trust/parity_step_1": 1.0})
    )
    text = page_of(run).text
    assert "0 0 within limit 1 1 above limit" in text
    assert "trust.max_log_prob_diff : 1e-05" in text


def test_the_sync_table_has_a_line_per_push(run: RunDirectory) -> None:
    text = page_of(run).text
    assert "version component tensors size time checksum verdict" in text
    assert "4 transformer 3 9.5 MB 0.25 s 0404040404040404 checksum equal" in text


def test_a_long_run_shows_the_pushes_that_matter(run: RunDirectory) -> None:
    for version in range(5, 60):
        record_push(run, push(version, missing=("w",) if version == 30 else ()), "checksum equal")
    text = page_of(run).text
    assert "10 of 60 pushes: the first, the newest, and those that were not proved" in text
    assert "1 names missing, 0 unexpected" in text


@pytest.mark.parametrize(
    ("unproven", "words"),
    [
        (["flow_shift", "guidance_scale"], "flow_shift guidance_scale"),
        ([], "Nothing: every setting of a request came back"),
        (None, "What the engine could not confirm Not recorded."),
    ],
)
def test_what_the_engine_could_not_confirm_is_listed(
    run: RunDirectory, unproven: list[str] | None, words: str
) -> None:
    summary = json.loads(run.summary.read_text())
    summary.pop("unproven")
    write_json_atomic(
        run.summary, summary if unproven is None else summary | {"unproven": unproven}
    )
    assert words in page_of(run).text


def test_phase_times_are_listed_longest_first_with_shares(run: RunDirectory) -> None:
    text = page_of(run).text
    # 5 x 2.0 + 5 x 1.0 + 2 x 0.5 + 5 x 0.1 = 16.5 seconds
    assert "rollout 10 s 60.6 %" in text
    assert "train 5 s 30.3 % eval 1 s 6.1 % unaccounted 0.5 s 3.0 %" in text


def test_many_phases_are_joined_so_that_colours_suffice(run: RunDirectory) -> None:
    extra = {f"perf/phase_{number}_time": 0.01 for number in range(12)}
    append_json_line(run.metrics, row_of(5, **extra))
    text = page_of(run).text
    assert "other" in text
    kinds = {bar["fill"] for bar in page_of(run).named("rect")}
    assert kinds <= {f"var(--k{number})" for number in range(8)}


def test_versions_components_and_recipe_are_shown(run: RunDirectory) -> None:
    page = page_of(run)
    assert "reward ocr drl-reward-ocr 1" in page.text
    assert "torch" in page.text
    assert 'name = "glyphs"' in page.text
    assert "glyphs · glyphs-run" in page.text


def test_prompts_and_all_other_text_are_escaped(tmp_path: Path, make_sample: Make) -> None:
    run = RunDirectory.create(tmp_path, "hostile")
    fill(run, make_sample, text=HOSTILE)
    write_text_atomic(run.recipe, f"[run]\nname = '''{HOSTILE}'''\n")
    summary = json.loads(run.summary.read_text())
    summary |= {"unproven": [HOSTILE], "status": HOSTILE, "seed": HOSTILE}
    summary["heldout"]["sampler"] = HOSTILE
    write_json_atomic(run.summary, summary)
    parts = {"kind": HOSTILE, "name": HOSTILE, "distribution": HOSTILE, "version": HOSTILE}
    facts = {"python": HOSTILE, "packages": {HOSTILE: HOSTILE}, "components": [parts]}
    write_json_atomic(run.plugins, facts)
    append_json_line(run.metrics, row_of(6, **{f"eval/{HOSTILE.replace('/', '')}": 1.0}))
    append_json_line(run.metrics, {"step": 7, HOSTILE: "no number"})
    keys = ("version", "component", "tensors", "bytes", "seconds", "checksum", "verdict", "ok")
    append_json_line(run.sync, dict.fromkeys(keys, HOSTILE))
    page = page_of(run)
    assert page.named("script") == []
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert all((image["src"] or "").startswith("data:") for image in page.named("img"))
    assert page.text.count("<script>alert(1)</script>") >= 10


def test_an_unfinished_run_has_a_report_that_says_what_is_absent(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "young")
    write_text_atomic(run.recipe, '[run]\nname = "young"\n')
    append_json_line(run.metrics, row_of(0))
    with run:
        text = page_of(run).text
    assert "unfinished" in text
    assert "No held-out comparison is recorded yet." in text
    assert (
        "summary.json is absent plugins.json is absent sync.jsonl is absent "
        "samples/before/samples.json is absent samples/after/samples.json is absent" in text
    )
    assert "1 iterations 64 images seen 3.1 s training time" in text
    assert "Training reward last 0.5" in text


@pytest.mark.parametrize(
    "name", ["recipe.toml", "metrics.jsonl", "summary.json", "plugins.json", "sync.jsonl"]
)
def test_each_file_may_be_absent_alone(run: RunDirectory, name: str) -> None:
    (run.path / name).unlink()
    assert f"{name} is absent" in page_of(run).text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"heldout": {"before": "x"}, "parity": [], "unproven": 3}',
        b'{"heldout": {"before": 1e999, "after": 1, "difference": 1, "ci_low": 1, "ci_high": 1}}',
        b'{"train_seconds": NaN, "parity": {"by_step": {"a": 1, "1": "b", "2": 0.5}}, "packages": 1}',
        b'{"step": 1, "train/loss": 1e308, "perf/train_time": -1, "components": [1]}',
        b'{"step": 999999999999999999999999, "packages": {"a": {}}, "ok": 1}',
    ],
)
def test_damaged_files_never_stop_the_report(run: RunDirectory, content: bytes) -> None:
    files = [run.recipe, run.metrics, run.summary, run.plugins, run.sync]
    files += [run.samples / "before" / "samples.json", run.samples / "after" / "samples.json"]
    for path in files:
        path.write_bytes(content)
    assert "Not everything could be shown" in page_of(run).text
    for path in files[:5]:
        path.unlink()
        run.recipe.touch()
        page_of(run)


def test_broken_pictures_are_named_and_paths_out_of_the_folder_are_refused(
    run: RunDirectory,
) -> None:
    (run.samples / "before" / "0000.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (run.samples / "before" / "0001.png").unlink()
    (run.path / "secret.png").write_bytes((run.samples / "after" / "0000.png").read_bytes())
    index = run.samples / "step_0000004" / "samples.json"
    write_json_atomic(index, [{"file": "../../secret.png"}, {"file": 3}, {"file": ""}, {}, 7])
    text = page_of(run).text
    assert "samples/before/0000.png is absent or no picture" in text
    assert "samples/before/0001.png is absent or no picture" in text
    assert "samples/step_0000004/samples.json names a file outside its folder" in text
    assert "Samples of step_0000004" not in text


def test_large_pictures_are_shrunk_so_that_the_report_stays_small(
    run: RunDirectory, make_sample: Make
) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(3, 1, 320, 480, generator=generator)
    samples = [make_sample(row=row, pixels=noise) for row in range(8)]
    for folder in ("before", "after", "step_0000004"):
        save_samples(run.samples / folder, samples, rows=3)
    path = write_report(run.path)
    assert path.stat().st_size < 2_000_000
    shown = Page(path.read_text()).named("img")
    assert {(image["width"], image["height"]) for image in shown} == {("256", "171")}
    assert (shown[0]["src"] or "").startswith("data:image/jpeg")


def test_a_long_run_stays_small(run: RunDirectory) -> None:
    lines = [json.dumps(row_of(step, **{"eval/heldout": 0.1})) for step in range(5000)]
    run.metrics.write_text("\n".join(lines) + "\n")
    assert write_report(run.path).stat().st_size < 1_000_000


def test_a_second_report_of_the_same_run_is_byte_equal(run: RunDirectory) -> None:
    first = write_report(run.path).read_bytes()
    assert write_report(run.path).read_bytes() == first


def test_the_report_names_no_path_of_the_machine(run: RunDirectory) -> None:
    assert str(run.path.parent) not in write_report(run.path).read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.254, "0.25 s"),
        (42.4, "42 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
        (float("inf"), "?"),
        ("x", "?"),
    ],
)
def test_times_are_written_for_people(seconds: object, words: str) -> None:
    assert duration_words(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (512, "512 B"),
        (1500, "1.5 kB"),
        (9.5e6, "9.5 MB"),
        (2e9, "2.0 GB"),
        (3e13, "30.0 TB"),
        (None, "?"),
    ],
)
def test_sizes_are_written_for_people(count: object, words: str) -> None:
    assert size_words(count) == words
