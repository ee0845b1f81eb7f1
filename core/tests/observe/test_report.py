"""What the report of a whole run says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.interfaces.updater import PushReport
from drl.observe.directory import RunDirectory
from drl.observe.files import append_json_line, write_json_atomic
from drl.observe.report import duration_words, gather, size_words, write_report
from drl.observe.summary import record_push
from drl.types import Sample

Make = Callable[..., Sample]
Row = Callable[..., dict[str, Any]]
Push = Callable[..., PushReport]
PageOf = Callable[[RunDirectory], Any]
ReadPage = Callable[[Path], Any]
Fill = Callable[..., None]
SAMPLER = "euler ODE, 8 steps, guidance 1, 48x16, seeds 42..43"


def test_the_report_is_one_small_file_that_loads_nothing(
    run: RunDirectory, read_page: ReadPage
) -> None:
    path = write_report(run.path)
    assert path == run.report
    assert path.stat().st_size < 2_000_000
    page = read_page(path)
    assert page.named("script") == []
    assert page.named("link") == []
    sources = [attributes["src"] or "" for attributes in page.named("img")]
    assert sources
    assert all(source.startswith("data:image/") for source in sources)
    policy = [meta["content"] for meta in page.named("meta") if "http-equiv" in meta]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert "url(" not in path.read_text()
    assert "@import" not in path.read_text()


def test_the_headline_gives_both_samplers_with_interval_counts_and_claim(
    run: RunDirectory, page_of: PageOf
) -> None:
    text = page_of(run).text
    assert "0.250 → 0.750" in text
    assert "+0.500, 95 % interval +0.500 to +0.500" in text
    assert "better: the interval lies above 0" in text
    assert f"40 images of 20 words, same noise before and after. Sampler: {SAMPLER}." in text
    assert "Held-out reward, rollout's own sampler 0.250 → 0.250" in text
    assert "no change shown: the interval holds 0" in text
    assert "5 iterations 320 images seen 2 min 05 s training time, evaluations apart 7 seed" in text


def test_reward_spread_and_held_out_reward_are_the_first_curves_of_a_short_run(
    run: RunDirectory, page_of: PageOf
) -> None:
    page = page_of(run)
    text = page.text
    titles = ["Training reward", "Held-out reward: heldout", "Ratio from 1", "Clip share", "Loss"]
    places = [text.index(f"{title} last") for title in titles]
    assert places == sorted(places)
    assert len(page.named("polygon")) == 2  # the band of the reward, over both axes


def test_the_value_in_the_report_is_the_value_in_the_log_with_its_unit(
    run: RunDirectory, page_of: PageOf
) -> None:
    text = page_of(run).text
    assert "Training reward last 0.54 reward, mean ± standard deviation over samples" in text
    assert "Held-out reward: heldout last 0.7 reward, mean over samples" in text
    assert f"eval/heldout ; {SAMPLER}" in text
    assert "Gradient norm last 0.5 L2 norm before clipping" in text


def test_curves_run_over_iterations_and_over_images_seen(
    run: RunDirectory, page_of: PageOf
) -> None:
    page = page_of(run)
    labels = [svg["aria-label"] or "" for svg in page.named("svg")]
    over_iterations = [text for text in labels if text.endswith("over iteration")]
    over_images = [text for text in labels if text.endswith("over images seen")]
    assert len(over_images) == 6
    assert len(over_iterations) == len(over_images) + 1  # the phase times have one axis
    assert "64" not in labels
    assert "300" in page.text  # a tick of the images axis, which ends at 320


def test_inner_updates_are_lines_of_their_own(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    extra = {"train/ratio_abs_minus_1_update_0": 0.0, "train/ratio_abs_minus_1_update_1": 1e-3}
    append_json_line(run.metrics, row_of(5, **extra))
    append_json_line(run.metrics, row_of(6, **extra))
    assert "update 0 update 1" in page_of(run).text


def test_one_inner_update_needs_no_line_of_its_own(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    append_json_line(run.metrics, row_of(5, **{"train/ratio_abs_minus_1_update_0": 0.0}))
    assert "update 0" not in page_of(run).text


def test_each_sampler_has_a_chart_of_its_own_that_names_it(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    noisy = {"eval/heldout/rollout_sampler": 0.75, "eval/heldout/words_exact": 0.1}
    append_json_line(run.metrics, row_of(5, **noisy))
    text = page_of(run).text
    assert f"eval/heldout ; {SAMPLER}" in text
    assert "eval/heldout/rollout_sampler ; cps noise 0.7, 8 steps" in text
    assert "words_exact" not in text


def test_a_push_that_was_not_verified_does_not_look_proved(
    run: RunDirectory, read_page: ReadPage, push: Push
) -> None:
    record_push(run, push(5), "not verified (sync.verify)")
    page = read_page(write_report(run.path))
    cells = [cell.get("class") for cell in page.named("td")]
    assert cells.count("none") == 1


def test_reward_terms_are_drawn_only_when_there_are_several(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    append_json_line(run.metrics, row_of(5, **{"rollout/reward/ocr_mean": 0.5}))
    assert "Reward term" not in page_of(run).text
    append_json_line(run.metrics, row_of(5, **{"rollout/reward/jpeg_mean": 0.5}))
    text = page_of(run).text
    assert "Reward term ocr" in text
    assert "Reward term jpeg" in text


def test_pairs_show_the_same_seed_and_say_how_they_were_picked(
    run: RunDirectory, page_of: PageOf
) -> None:
    page = page_of(run)
    assert "24 of 40 pairs, evenly picked by their order in the data" in page.text
    assert len([image for image in page.named("img") if image["alt"] == "before"]) == 24
    assert "sign 0 0.25 → 0.75, seed 42" in page.text
    shown = next(image for image in page.named("img"))
    assert (shown["width"], shown["height"]) == ("144", "48")


def test_pairs_are_matched_by_row_and_seed_not_by_place(run: RunDirectory, page_of: PageOf) -> None:
    index = run.samples / "after" / "samples.json"
    entries = json.loads(index.read_text())
    entries.reverse()
    for entry in entries:
        entry["reward"] = entry["row"] / 100 + (entry["seed"] - 42) / 1000
    write_json_atomic(index, entries[:-1])
    page = page_of(run)
    assert "24 of 39 pairs" in page.text
    assert "sign 19 0.25 → 0.19, seed 42" in page.text


def test_the_parity_table_holds_every_step_against_the_limit(
    run: RunDirectory, page_of: PageOf
) -> None:
    text = page_of(run).text
    assert "max |Δ log-prob| 0 0 within limit 1 2e-05 above limit" in text
    assert "Limit trust.max_log_prob_diff : 1e-05" in text


def test_parity_and_limit_of_an_unfinished_run_come_from_figures_and_recipe(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    run.summary.unlink()
    append_json_line(
        run.metrics, row_of(0, **{"trust/parity_step_0": 0.0, "trust/parity_step_1": 1.0})
    )
    text = page_of(run).text
    assert "0 0 within limit 1 1 above limit" in text
    assert "trust.max_log_prob_diff : 1e-05" in text


def test_the_sync_table_has_a_line_per_push(run: RunDirectory, page_of: PageOf) -> None:
    text = page_of(run).text
    assert "version component tensors size time checksum verdict" in text
    assert "4 transformer 3 9.5 MB 0.25 s 0404040404040404 checksum equal" in text


def test_a_long_run_shows_the_pushes_that_matter(
    run: RunDirectory, page_of: PageOf, push: Push
) -> None:
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
    run: RunDirectory, unproven: list[str] | None, words: str, page_of: PageOf
) -> None:
    summary = json.loads(run.summary.read_text())
    summary.pop("unproven")
    write_json_atomic(
        run.summary, summary if unproven is None else summary | {"unproven": unproven}
    )
    assert words in page_of(run).text


def test_phase_times_are_listed_longest_first_with_shares(
    run: RunDirectory, page_of: PageOf
) -> None:
    text = page_of(run).text
    # 5 x 2.0 + 5 x 1.0 + 2 x 0.5 + 5 x 0.1 = 16.5 seconds
    assert "rollout 10 s 60.6 %" in text
    assert "train 5 s 30.3 % eval 1 s 6.1 % unaccounted 0.5 s 3.0 %" in text


def test_many_phases_are_joined_so_that_colours_suffice(
    run: RunDirectory, page_of: PageOf, row_of: Row
) -> None:
    extra = {f"perf/phase_{number}_time": 0.01 for number in range(12)}
    append_json_line(run.metrics, row_of(5, **extra))
    text = page_of(run).text
    assert "other" in text
    kinds = {bar["fill"] for bar in page_of(run).named("rect")}
    assert kinds <= {f"var(--k{number})" for number in range(8)}


def test_versions_components_and_recipe_are_shown(run: RunDirectory, page_of: PageOf) -> None:
    page = page_of(run)
    assert "reward ocr drl-reward-ocr 1" in page.text
    assert "torch" in page.text
    assert 'name = "glyphs"' in page.text
    assert "glyphs · glyphs-run" in page.text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.254, "0.25 s"),
        (42.4, "42 s"),
        (9.99, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min 00 s"),
        (185, "3 min 05 s"),
        (7199, "119 min 59 s"),
        (7200, "2 h 00 min"),
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
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1500, "1.5 kB"),
        (9.5e6, "9.5 MB"),
        (2e9, "2.0 GB"),
        (3e13, "30.0 TB"),
        (None, "?"),
    ],
)
def test_sizes_are_written_for_people(count: object, words: str) -> None:
    assert size_words(count) == words


@pytest.mark.parametrize(
    ("count", "failed", "shown"),
    [
        (12, (), [*range(12)]),
        (13, (), [0, *range(5, 13)]),
        (13, (0, 12), [0, *range(5, 13)]),
        (30, (3, 20, 25), [0, 3, 20, *range(22, 30)]),
        (60, tuple(range(1, 40)), [0, *range(1, 13), *range(52, 60)]),
    ],
)
def test_of_many_pushes_the_first_the_newest_and_the_bad_are_shown_once(
    run: RunDirectory, push: Push, count: int, failed: tuple[int, ...], shown: list[int]
) -> None:
    run.sync.unlink()
    for version in range(count):
        record_push(run, push(version, missing=("w",) if version in failed else ()), "equal")
    view = gather(run)
    assert [row["version"] for row in view.pushes] == shown
    assert view.push_count == count


def test_a_step_at_the_limit_passes_and_steps_stand_in_their_order(run: RunDirectory) -> None:
    summary = json.loads(run.summary.read_text())
    steps = {"10": 1e-5, "9": 1.1e-5, "0": 0.0, "-1": 1.0, "1234567": 1.0, "x": 1.0, "2": None}
    summary["parity"] = {"limit": 1e-5, "by_step": steps}
    write_json_atomic(run.summary, summary)
    rows = [(row.step, row.difference, row.passed) for row in gather(run).parity]
    assert rows == [(0, 0.0, True), (9, 1.1e-5, False), (10, 1e-5, True)]


def test_parity_without_a_limit_is_shown_without_a_judgement(run: RunDirectory) -> None:
    summary = json.loads(run.summary.read_text())
    del summary["parity"]["limit"]
    write_json_atomic(run.summary, summary)
    run.recipe.write_text("")
    view = gather(run)
    assert (view.parity_limit, {row.passed for row in view.parity}) == (None, {None})


def test_what_is_damaged_is_named_once_and_the_rest_is_read(run: RunDirectory, row_of: Row) -> None:
    run.recipe.write_text("[run\n")
    run.plugins.write_text("[1, 2]")
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "train/lo')
    view = gather(run)
    assert view.remarks == (
        "recipe.toml is not valid TOML; it is shown as it is",
        "metrics.jsonl line 6 is not a whole JSON object; it was left out",
        "plugins.json is no JSON object; it was left out",
    )
    assert (view.recipe, view.components, view.missing) == ("[run\n", (), ())
    assert view.panels


def test_scores_before_training_are_no_iteration(run: RunDirectory, row_of: Row) -> None:
    run.summary.unlink()
    append_json_line(run.metrics, {"step": -1, "eval/heldout": 0.1})
    assert gather(run).facts[0] == ("iterations", "5")


@pytest.mark.parametrize("wrong", [None, "text", [1], {"ci_low": 1.0}, {"before": True}])
def test_a_comparison_that_lacks_a_figure_is_not_shown(run: RunDirectory, wrong: object) -> None:
    summary = json.loads(run.summary.read_text())
    whole = summary["heldout"]
    summary["heldout"] = wrong
    write_json_atomic(run.summary, summary)
    assert [result.title for result in gather(run).results] == [
        "Held-out reward, rollout's own sampler"
    ]
    for key in ("before", "after", "difference", "ci_low", "ci_high"):
        summary["heldout"] = {name: value for name, value in whole.items() if name != key}
        write_json_atomic(run.summary, summary)
        assert len(gather(run).results) == 1
