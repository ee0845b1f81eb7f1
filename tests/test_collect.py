"""Collecting a rollout with real parts: filters and redraws, order, prompts, noise, removed samples."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
import torch
from e2e import metric_rows, run_here, same, trained_weights, write_recipe
from third_party_plugins import fresh_recorder

from drl.catalog import Catalog
from drl.errors import BadInput
from drl.types import Dropped

STRANGERS = ("acme-recorder", "acme-engines")
QUIET = ("eval.datasets=[]",)
SEED = 1234
MEMBERS = 4


@pytest.fixture(scope="module")
def lab(lab):
    """The shared lab over five prompts."""
    write_prompts(lab, [f"sign number {n}" for n in range(5)])
    return lab


def write_prompts(folder, texts):
    rows = (json.dumps({"input": text}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text("".join(rows))


@pytest.fixture(scope="module")
def plain(lab):
    """Three undisturbed iterations: the run directory, and their rollouts."""
    Catalog.load()
    recorder = fresh_recorder()
    run_here(lab / "tiny.toml", lab / "plain", "train.num_rollout=3", *QUIET)
    return lab / "plain", rollouts(recorder)


def rollouts(recorder):
    return [given["rollout"] for hook, given in recorder.CALLS if hook == "drl_rollout_finished"]


def drawn(made):
    """Return (group number, prompt row, epoch) of every kept group, rollout by rollout."""
    return [[(g.group_index, g.prompt.row, g.prompt.epoch) for g in r.groups] for r in made]


def drop(*numbers, reason="dull"):
    return lambda run, group: Dropped(reason) if group.group_index in numbers else None


def test_every_prompt_and_member_comes_once_per_epoch(plain):
    groups = [group for rollout in plain[1] for group in rollout.groups]
    first_epoch = [group for group in groups if group.prompt.epoch == 0]
    seen = Counter((g.prompt.row, s.member) for g in first_epoch for s in g.samples)
    assert seen == Counter(itertools.product(range(1, 6), range(MEMBERS)))
    assert [(g.prompt.row, g.prompt.epoch) for g in groups[5:]] == [(1, 1)]


def test_samples_are_numbered_by_group_and_member(plain):
    samples = [sample for rollout in plain[1] for sample in rollout.samples]
    assert [s.index for s in samples] == list(range(24))
    assert all(s.index == s.group_index * MEMBERS + s.member for s in samples)


def test_seeds_are_the_integers_of_run_seed_group_and_member(plain):
    samples = [sample for rollout in plain[1] for sample in rollout.samples]
    assert [s.seed for s in samples] == [SEED + s.index for s in samples]


def test_no_two_samples_of_a_rollout_are_alike(plain):
    pictures = [sample.media.pixels for sample in plain[1][0].samples]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(pictures, 2))


def test_members_of_a_group_share_their_stochastic_steps(plain):
    windows = {}
    for sample in (s for rollout in plain[1] for s in rollout.samples):
        windows.setdefault(sample.group_index, set()).add(sample.trajectory.sde_steps)
    assert all(len(chosen) == 1 for chosen in windows.values())
    assert len(set.union(*windows.values())) > 1  # groups differ, members do not


@pytest.mark.parametrize("change", ["rollout.microgroup_size=4", "rollout.batch_size=1"])
def test_noise_depends_on_seed_group_and_member_only(recipe, tmp_path, recorder, plain, change):
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", change, *QUIET)
    expected = {sample.index: sample for sample in plain[1][0].samples}
    for sample in rollouts(recorder)[0].samples:
        assert torch.equal(sample.media.pixels, expected[sample.index].media.pixels)


def test_the_order_in_which_groups_finish_changes_nothing(recipe, tmp_path, recorder, plain):
    recorder.REACTIONS["drl_filter_group"] = drop(1, 4)
    for name in ("local", "acme_slow"):
        sets = (f"rollout.engine={name}", f"rollout.{name}.rows=4", "rollout.batch_size=3")
        run_here(recipe, tmp_path / name, *sets, "train.num_rollout=2", *QUIET)
    arrived = [g["group"].group_index for hook, g in recorder.CALLS if hook == "drl_filter_group"]
    middle = len(arrived) // 2
    assert sorted(arrived[:middle]) == sorted(arrived[middle:])
    assert arrived[middle:] != arrived[:middle]  # it did come in another order
    made = rollouts(recorder)
    assert drawn(made[:2]) == drawn(made[2:])
    assert same(trained_weights(tmp_path / "local", 2), trained_weights(tmp_path / "acme_slow", 2))
    assert metric_rows(tmp_path / "local") == metric_rows(tmp_path / "acme_slow")


def test_dropped_groups_are_replaced_by_fresh_prompts_and_counted(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_filter_group"] = drop(1, 2)
    run_here(recipe, tmp_path / "run", "train.num_rollout=2", *QUIET)
    assert drawn(rollouts(recorder)) == [[(0, 1, 0), (3, 4, 0)], [(4, 5, 0), (5, 1, 1)]]
    first, second = metric_rows(tmp_path / "run")
    assert first["rollout/dynamic_filter/drop_dull"] == 2
    assert not any("dynamic_filter" in name for name in second)
    assert second["rollout/images_seen"] == 2 * 2 * MEMBERS


def test_reasons_are_counted_apart(recipe, tmp_path, recorder):
    reasons = {0: "dull", 1: "bright", 3: "dull"}
    recorder.REACTIONS["drl_filter_group"] = lambda run, group: (
        Dropped(reasons[group.group_index]) if group.group_index in reasons else None
    )
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", *QUIET)
    (row,) = metric_rows(tmp_path / "run")
    found = {name: value for name, value in row.items() if "dynamic_filter" in name}
    assert found == {
        "rollout/dynamic_filter/drop_dull": 2,
        "rollout/dynamic_filter/drop_bright": 1,
    }


def test_prompts_and_group_numbers_continue_after_a_resume(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_filter_group"] = drop(1, 3, 4, 7)
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    run_here(recipe, straight, "train.num_rollout=3", *QUIET)
    run_here(recipe, parted, "train.num_rollout=1", *QUIET)
    run_here(recipe, parted, "train.num_rollout=3", *QUIET, resume=True)
    made = rollouts(recorder)
    assert drawn(made[:3]) == drawn(made[3:])
    assert same(trained_weights(straight, 3), trained_weights(parted, 3))


def test_a_filter_that_drops_everything_stops_at_max_draws(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_filter_group"] = drop(*range(100))
    with pytest.raises(BadInput, match=r"rollout\.max_draws: 4 groups .*'dull': 4") as caught:
        run_here(recipe, tmp_path / "run", "rollout.max_draws=2", *QUIET)
    assert "now 2" in str(caught.value)
    assert recorder.CALLS[-1][1]["error"] is caught.value


def test_duplicate_prompts_stay_two_groups(checkpoint, tmp_path, recorder):
    recipe = write_recipe(tmp_path, checkpoint)
    write_prompts(tmp_path, ["the same sign", "the same sign"])
    sets = ("train.num_rollout=1", "eval.n_samples_per_prompt=2")
    run_here(recipe, tmp_path / "run", *sets)
    (rollout,) = rollouts(recorder)
    assert [group.prompt.row for group in rollout.groups] == [1, 2]
    assert len({sample.seed for sample in rollout.samples}) == 2 * MEMBERS
    rows = json.loads((tmp_path / "run" / "evaluations" / "after.json").read_text())["rows"]
    assert [(row["row"], row["member"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def advantages(rewards):
    """Group-normalised rewards as the estimator defines them: unbiased deviation, 1e-4 added."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist()


def test_removed_samples_leave_sum_and_divisor_but_count_for_their_group(
    recipe, tmp_path, recorder
):
    removed = {1, 2, 7}

    def remove(run, rollout):
        for sample in rollout.samples:
            sample.removed = sample.index in removed

    recorder.REACTIONS["drl_rollout_finished"] = remove
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", *QUIET)
    (rollout,) = rollouts(recorder)
    known = [a for g in rollout.groups for a in advantages([s.reward for s in g.samples])]
    left = [value for index, value in enumerate(known) if index not in removed]
    (row,) = metric_rows(tmp_path / "run")
    # before the first step every ratio is 1: the loss is minus the mean advantage
    assert row["train/loss"] == pytest.approx(-sum(left) / len(left), rel=1e-5)
    assert row["train/adv_abs_mean"] == pytest.approx(sum(map(abs, left)) / len(left), rel=1e-5)


def test_a_rollout_of_removed_samples_takes_no_step(recipe, tmp_path, recorder):
    def remove(run, rollout):
        for sample in rollout.samples:
            sample.removed = True

    recorder.REACTIONS["drl_rollout_finished"] = remove
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", *QUIET)
    reports = [given["report"] for hook, given in recorder.CALLS if hook == "drl_step_finished"]
    assert [report.skipped for report in reports] == ["every row of the window has weight 0"]
    assert all(
        not w.any() for n, w in trained_weights(tmp_path / "run", 1).items() if n.endswith("B")
    )
