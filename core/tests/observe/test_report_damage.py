"""Reports of runs that are hostile, unfinished, damaged or large."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drl.errors import RunDirectoryError
from drl.interfaces.updater import PushReport
from drl.observe.directory import RunDirectory
from drl.observe.files import append_json_line, write_json_atomic, write_text_atomic
from drl.observe.pictures import save_samples
from drl.observe.report import write_report
from drl.types import Sample

Make = Callable[..., Sample]
Row = Callable[..., dict[str, Any]]
Push = Callable[..., PushReport]
PageOf = Callable[[RunDirectory], Any]
ReadPage = Callable[[Path], Any]
Fill = Callable[..., None]
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e'


def test_prompts_and_all_other_text_are_escaped(
    tmp_path: Path, page_of: PageOf, row_of: Row, fill: Fill
) -> None:
    run = RunDirectory.create(tmp_path, "hostile")
    fill(run, text=HOSTILE)
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


def test_an_unfinished_run_has_a_report_that_says_what_is_absent(
    tmp_path: Path, page_of: PageOf, row_of: Row
) -> None:
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
def test_each_file_may_be_absent_alone(run: RunDirectory, name: str, page_of: PageOf) -> None:
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
def test_damaged_files_never_stop_the_report(
    run: RunDirectory, content: bytes, page_of: PageOf
) -> None:
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
    run: RunDirectory, page_of: PageOf
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
    run: RunDirectory, make_sample: Make, read_page: ReadPage
) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(3, 1, 320, 480, generator=generator)
    samples = [make_sample(row=row, pixels=noise) for row in range(8)]
    for folder in ("before", "after", "step_0000004"):
        save_samples(run.samples / folder, samples, rows=3)
    path = write_report(run.path)
    assert path.stat().st_size < 2_000_000
    shown = read_page(path).named("img")
    assert {(image["width"], image["height"]) for image in shown} == {("256", "171")}
    assert (shown[0]["src"] or "").startswith("data:image/jpeg")


def test_a_long_run_stays_small(run: RunDirectory, row_of: Row) -> None:
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
