from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drl.errors import RewardError
from drl.interfaces.updater import PushReport
from drl.observe.directory import RunDirectory
from drl.observe.summary import (
    Heldout,
    Summary,
    compare,
    headline,
    pair_samples,
    parity_metrics,
    parity_steps,
    parity_summary,
    record_push,
    sampler_sentence,
    sync_totals,
    verdict,
    write_summary,
)
from drl.types import ParityReport, Sample, Sampling

Make = Callable[..., Sample]
SAMPLER = "euler ODE, 8 steps, guidance 1, 48x16, seeds 42..43"


def evaluation(make: Make, rewards: list[list[float | None]]) -> list[Sample]:
    """Samples of one evaluation: one list of rewards per word, one seed per place."""
    return [
        make(row=row, text=f"word {row}", seed=42 + place, reward=reward, member=place)
        for row, of_word in enumerate(rewards)
        for place, reward in enumerate(of_word)
    ]


def push(version: int, **changed: Any) -> PushReport:
    values: dict[str, Any] = {
        "version": version,
        "component": "transformer",
        "names": ("a", "b"),
        "buckets": 1,
        "bytes": 1000,
        "checksum": f"{version:064x}",
        "seconds": 0.25,
    }
    return PushReport(**(values | changed))


def test_comparison_equals_the_numbers_worked_by_hand(make_sample: Make) -> None:
    before = evaluation(make_sample, [[0.0, 0.5], [1.0, 0.5]])
    after = evaluation(make_sample, [[0.5, 0.5], [1.0, 1.0]])
    # Differences 0.5, 0, 0, 0.5. Both words gain 0.25 on average, so every resample gives 0.25.
    assert compare(before, after, sampler=SAMPLER) == Heldout(
        before=0.5,
        after=0.75,
        difference=0.25,
        ci_low=0.25,
        ci_high=0.25,
        images=4,
        words=2,
        sampler=SAMPLER,
    )


def test_the_interval_resamples_words_and_not_images(make_sample: Make) -> None:
    before = evaluation(make_sample, [[0.0] * 4, [0.0] * 4])
    after = evaluation(make_sample, [[1.0] * 4, [0.0] * 4])
    found = compare(before, after, sampler=SAMPLER)
    # Two words: a quarter of the draws take the first twice and a quarter the second twice. Taking
    # the eight images as independent would give about 0.13 to 0.88 instead.
    assert (found.difference, found.ci_low, found.ci_high) == (0.5, 0.0, 1.0)


def test_the_same_scores_give_the_same_interval(make_sample: Make) -> None:
    before = evaluation(make_sample, [[0.1 * word, 0.2] for word in range(8)])
    after = evaluation(make_sample, [[0.3, 0.05 * word] for word in range(8)])
    first = compare(before, after, sampler=SAMPLER)
    assert compare(before, after, sampler=SAMPLER) == first
    assert first.ci_low < first.difference < first.ci_high


def test_a_pair_with_a_failed_score_is_left_out_and_counted(make_sample: Make) -> None:
    before = evaluation(make_sample, [[None, 0.5], [0.25, 0.5]])
    after = evaluation(make_sample, [[1.0, 0.75], [None, 0.75]])
    found = compare(before, after, sampler=SAMPLER)
    assert (found.images, found.words, found.failed) == (2, 2, 2)
    assert (found.before, found.after) == (0.5, 0.75)


def test_no_valid_pair_is_an_error_that_says_where_to_look(make_sample: Make) -> None:
    with pytest.raises(
        RewardError, match=r"none of 2 held-out samples .* look at the reward's own"
    ):
        compare(
            evaluation(make_sample, [[None, 0.5]]),
            evaluation(make_sample, [[0.5, None]]),
            sampler=SAMPLER,
        )


def test_pairs_are_found_by_row_and_seed_in_any_order(make_sample: Make) -> None:
    before = evaluation(make_sample, [[0.1, 0.2], [0.3, 0.4]])
    pairs = pair_samples(before, list(reversed(before)))
    assert [(first.reward, second.reward) for first, second in pairs] == [
        (0.1, 0.1),
        (0.2, 0.2),
        (0.3, 0.3),
        (0.4, 0.4),
    ]


def test_a_text_that_occurs_in_two_rows_is_two_pairs_but_one_word(make_sample: Make) -> None:
    samples = [make_sample(row=row, text="twice", reward=0.5) for row in (3, 9)]
    found = compare(samples, samples, sampler=SAMPLER)
    assert (found.images, found.words) == (2, 1)


def test_other_noise_before_and_after_is_refused(make_sample: Make) -> None:
    before = [make_sample(row=0, seed=42)]
    with pytest.raises(ValueError, match=r"unpaired: \[\(0, 42\), \(0, 43\)\]"):
        pair_samples(before, [make_sample(row=0, seed=43)])
    with pytest.raises(ValueError, match="got 2 and 2 samples"):
        pair_samples(before * 2, before * 2)


@pytest.mark.parametrize(
    ("sampling", "seeds", "sentence"),
    [
        (
            Sampling(num_steps=8, height=16, width=48),
            [45, 42, 43, 44, 42],
            "euler ODE, 8 steps, guidance 1, 48x16, seeds 42..45",
        ),
        (
            Sampling(num_steps=10, height=16, width=48, sde_type="cps", noise_level=0.7),
            [7],
            "cps noise 0.7, 10 steps, guidance 1, 48x16, seed 7",
        ),
        (
            Sampling(
                num_steps=28,
                height=480,
                width=832,
                num_frames=81,
                guidance_scale=4.5,
                guidance_scale_2=3.0,
                flow_shift=7.0,
                negative_prompt="blurry",
            ),
            [1, 3],
            "euler ODE, 28 steps, guidance 4.5, second guidance 3, shift 7, 832x480x81 frames, "
            "negative prompt 'blurry', seeds 1 3",
        ),
        (
            Sampling(num_steps=8, height=16, width=16, true_cfg_scale=4.0),
            [1, 3, 5, 7, 9, 11],
            "euler ODE, 8 steps, guidance 1, true guidance 4, 16x16, seeds 1 3 5 7 and 2 more",
        ),
        (
            Sampling(num_steps=8, height=16, width=16),
            [],
            "euler ODE, 8 steps, guidance 1, 16x16, no seeds",
        ),
    ],
)
def test_the_sampler_is_named_with_everything_a_score_hangs_on(
    sampling: Sampling, seeds: list[int], sentence: str
) -> None:
    assert sampler_sentence(sampling, seeds) == sentence


def test_two_samplers_never_share_a_sentence() -> None:
    base: dict[str, Any] = {"num_steps": 8, "height": 16, "width": 48}
    changes: list[dict[str, Any]] = [
        {},
        {"num_steps": 9},
        {"height": 32},
        {"width": 64},
        {"num_frames": 5},
        {"flow_shift": 3.0},
        {"guidance_scale": 4.0},
        {"true_cfg_scale": 4.0},
        {"guidance_scale_2": 4.0},
        {"guidance_scale": 4.0, "negative_prompt": "x"},
        {"sde_type": "cps", "noise_level": 0.7},
        {"sde_type": "sde", "noise_level": 0.7},
    ]
    sentences = {sampler_sentence(Sampling(**(base | change)), [42]) for change in changes}
    assert len(sentences) == len(changes)


def test_the_summary_file_holds_the_keys_that_others_read(
    tmp_path: Path, make_sample: Make
) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    samples = evaluation(make_sample, [[0.5, 0.5]])
    for version in range(2):
        record_push(directory, push(version), "checksum equal")
    summary = Summary(
        heldout=compare(samples, samples, sampler=SAMPLER),
        train_seconds=12.5,
        seed=7,
        iterations=2,
        images_seen=128,
        parity=parity_summary(ParityReport(by_step={0: 0.0, 3: 1e-6}, rows=64), limit=1e-5),
        sync=sync_totals(directory),
        unproven=("guidance_scale",),
    )
    write_summary(directory, summary)
    assert json.loads(directory.summary.read_text()) == {
        "heldout": {
            "before": 0.5,
            "after": 0.5,
            "difference": 0.0,
            "ci_low": 0.0,
            "ci_high": 0.0,
            "images": 2,
            "words": 1,
            "sampler": SAMPLER,
            "failed": 0,
        },
        "train_seconds": 12.5,
        "seed": 7,
        "iterations": 2,
        "images_seen": 128,
        "heldout_rollout_sampler": None,
        "parity": {"by_step": {"0": 0.0, "3": 1e-6}, "rows": 64, "worst": 1e-6, "limit": 1e-5},
        "sync": {
            "pushes": 2,
            "ok": True,
            "bytes": 2000,
            "seconds": 0.5,
            "version": 1,
            "checksum": f"{1:064x}",
        },
        "versions": {},
        "unproven": ["guidance_scale"],
        "status": "finished",
    }


def test_a_push_with_missing_names_is_never_recorded_as_proved(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    assert sync_totals(directory) is None
    record_push(directory, push(0, missing=("a",), unexpected=("b", "c")), "checksum equal")
    record_push(directory, push(1), "checksum equal")
    first, second = (json.loads(line) for line in directory.sync.read_text().splitlines())
    assert (first["ok"], first["verdict"]) == (False, "1 names missing, 2 unexpected")
    assert (second["ok"], second["verdict"]) == (True, "checksum equal")
    assert (second["tensors"], second["bytes"], second["seconds"]) == (2, 1000, 0.25)
    totals = sync_totals(directory)
    assert totals is not None
    assert not totals.ok


def test_parity_figures_go_out_and_come_back() -> None:
    report = ParityReport(by_step={0: 0.0, 12: 2e-6}, rows=8)
    figures = parity_metrics(report)
    assert figures == {
        "trust/parity_step_0": 0.0,
        "trust/parity_step_12": 2e-6,
        "trust/parity_worst": 2e-6,
    }
    assert parity_steps(figures | {"train/loss": 1.0}) == {0: 0.0, 12: 2e-6}


def test_the_headline_is_one_line_with_counts_interval_and_sampler() -> None:
    heldout = Heldout(
        before=0.596,
        after=0.686,
        difference=0.09,
        ci_low=0.044,
        ci_high=0.137,
        images=256,
        words=64,
        sampler=SAMPLER,
    )
    assert headline(heldout) == (
        "held-out reward 0.596 -> 0.686 (+0.090, 95 % interval +0.044 to +0.137; "
        f"256 images of 64 words; {SAMPLER})"
    )


@pytest.mark.parametrize(
    ("low", "high", "claim"),
    [
        (0.01, 0.1, "better"),
        (-0.1, -0.01, "worse"),
        (-0.1, 0.1, "no change"),
        (0.0, 0.1, "no change"),
    ],
)
def test_only_an_interval_without_zero_allows_a_claim(low: float, high: float, claim: str) -> None:
    assert verdict(low, high).startswith(claim)


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([], "no seeds"),
        ([7, 7], "seed 7"),
        ([3, 1, 2, 2], "seeds 1..3"),
        ([1, 3], "seeds 1 3"),
        ([9, 1, 3, 5], "seeds 1 3 5 9"),
        ([1, 3, 5, 7, 9], "seeds 1 3 5 7 and 1 more"),
    ],
)
def test_seeds_are_named_once_in_order_and_not_all(seeds: list[int], words: str) -> None:
    sampling = Sampling(num_steps=1, height=1, width=1)
    assert sampler_sentence(sampling, seeds).endswith(f", {words}")


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_sample_that_stands_twice_on_one_side_is_refused(make_sample: Make, side: str) -> None:
    once, twice = [make_sample(0), make_sample(1)], [make_sample(0), make_sample(1), make_sample(1)]
    before, after = (twice, once) if side == "before" else (once, twice)
    with pytest.raises(ValueError, match=rf"got {len(before)} and {len(after)} samples, unpaired"):
        pair_samples(before, after)


@pytest.mark.parametrize("named", ["missing", "unexpected"])
def test_names_on_one_side_alone_make_a_push_not_ok(tmp_path: Path, named: str) -> None:
    run = RunDirectory.create(tmp_path, "run")
    record_push(run, push(3, seconds=0.12345678, **{named: ("a", "b")}), "checksum equal")
    row = json.loads(run.sync.read_text())
    assert (row["ok"], row["seconds"]) == (False, 0.123457)
    assert f"2 {'names missing' if named == 'missing' else 'unexpected'}" in row["verdict"]
    record_push(run, push(4), "checksum equal")
    record_push(run, push(5), "checksum equal")
    totals = sync_totals(run)
    assert totals is not None
    assert (totals.ok, totals.pushes, totals.version) == (False, 3, 5)
    assert totals.checksum == f"{5:064x}"


def test_parity_is_read_from_its_own_figures_alone() -> None:
    figures = {
        "trust/parity_step_10": 1.0,
        "trust/parity_step_2": 2.0,
        "trust/parity_worst": 3.0,
        "trust/parity_step_": 4.0,
        "trust/parity_step_1234567": 5.0,
        "xtrust/parity_step_1": 6.0,
    }
    assert parity_steps(figures) == {10: 1.0, 2: 2.0}
