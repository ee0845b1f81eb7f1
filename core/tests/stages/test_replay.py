"""Dumps and replays of rollouts, evaluations and shards: files of the right names, and clear refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.dumps import read_dump, write_dump
from drl.errors import BadInput, DataError
from drl.stages.dump import (
    check_dump_files,
    dump_evaluation,
    dump_rollout,
    dump_shards,
    files_to_write,
)
from drl.stages.replay import first_and_last, replay
from drl.stages.rollout import training_sampling
from drl.stages.shards import build_shards
from drl.testing import make_pair, make_sample
from drl.types import EvaluationReport, Group, Rollout

STEPS = 4


def recipe_of(folder: Path, *, num_steps: int = STEPS, noise: float = 0.7, **debug: Any) -> Any:
    values = {
        "save_rollout_data": folder / "r" / "{rollout_id}",
        "save_train_data": folder / "t" / "{rollout_id}_{rank}",
        "load_rollout_data": folder / "r" / "{rollout_id}",
        "load_rollout_subsample": None,
    }
    sampling = SimpleNamespace(
        num_steps=num_steps,
        height=16,
        width=16,
        num_frames=1,
        fps=None,
        flow_shift=None,
        guidance_scale=1.0,
        guidance_scale_2=None,
        true_cfg_scale=None,
        negative_prompt=None,
        generator_device="cpu",
    )
    return SimpleNamespace(
        debug=SimpleNamespace(**(values | debug)),
        sampling=sampling,
        sde=SimpleNamespace(type="cps", noise_level=noise, log_prob_no_const=True),
        train=SimpleNamespace(num_rollout=3),
    )


def run_of(recipe: Any, *, needs_rollout: bool = True, sigmas: Any = None) -> Any:
    seen: list[Rollout] = []
    return SimpleNamespace(
        recipe=recipe,
        needs_rollout=needs_rollout,
        phases=SimpleNamespace(phase=lambda name: nullcontext()),
        counters=SimpleNamespace(next_group=0, images_seen=0),
        schedule=lambda sampling: sigmas,
        hooks=SimpleNamespace(drl_rollout_finished=lambda run, rollout: seen.append(rollout)),
        seen=seen,
    )


def rollout_of(groups: int = 2, *, number: int = 1) -> Rollout:
    made = []
    for group in range(5, 5 + groups):
        samples = [
            make_sample(index=10 * group + m, group_index=group, member=m, seed=m, steps=STEPS)
            for m in range(2)
        ]
        samples[0].reward, samples[1].removed = 0.5, True
        made.append(Group(group_index=group, prompt=samples[0].prompt, samples=samples))
    return Rollout(
        rollout_id=number, version=3, groups=made, dropped={"dull": 2}, metrics={"rollout/x": 1.0}
    )


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """A folder with the dump of rollout 1."""
    dump_rollout(run_of(recipe_of(tmp_path)), rollout_of())
    return tmp_path


def test_a_replay_is_the_rollout_that_was_dumped(dumped: Path) -> None:
    run, right = run_of(recipe_of(dumped)), rollout_of()
    found = replay(run, 1)
    assert (found.rollout_id, found.version, found.dropped) == (1, 3, {"dull": 2})
    assert found.metrics == {"rollout/x": 1.0}
    assert [s.index for s in found.samples] == [s.index for s in right.samples]
    assert [s.removed for s in found.samples] == [False, True] * 2
    assert [s.reward for s in found.samples] == [0.5, None] * 2
    for got, want in zip(found.samples, right.samples, strict=True):
        assert got.trajectory is not None
        assert want.trajectory is not None
        assert torch.equal(got.trajectory.latents["visual"], want.trajectory.latents["visual"])
        assert torch.equal(got.media.pixels, want.media.pixels)
        assert got.trajectory.sde_steps == want.trajectory.sde_steps
    # plugins see it, and the counters go on as if it had been generated
    assert run.seen == [found]
    assert (run.counters.images_seen, run.counters.next_group) == (4, 7)


def test_files_are_written_only_where_asked_for(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, save_rollout_data=None, save_train_data=None)
    run = run_of(recipe)
    dump_rollout(run, rollout_of())
    dump_evaluation(run, EvaluationReport(rollout_id=0, version=0, means={}))
    dump_shards(run, [])
    assert list(tmp_path.iterdir()) == []
    assert list(files_to_write(recipe, 0)) == []


def test_another_schedule_and_other_settings_are_refused_by_name(dumped: Path) -> None:
    own = torch.tensor([1.0, 0.9, 0.6, 0.3, 0.0])
    with pytest.raises(
        DataError, match=r"(?s)r/1 was made with another noise schedule.*0\.7500.*here: .*0\.9000"
    ):
        replay(run_of(recipe_of(dumped), sigmas=own), 1)
    with pytest.raises(
        DataError, match=r"(?s)other settings.*noise_level: the dump has 0\.7, .*0\.3"
    ):
        replay(run_of(recipe_of(dumped, noise=0.3)), 1)
    with pytest.raises(DataError, match="num_steps: the dump has 4, the recipe 5"):
        replay(run_of(recipe_of(dumped, num_steps=5)), 1)
    fine = torch.linspace(1.0, 0.0, 5) + 1e-7
    replay(run_of(recipe_of(dumped), sigmas=fine), 1)


def test_samples_of_two_schedules_are_refused(tmp_path: Path) -> None:
    mixed = rollout_of()
    last = mixed.samples[-1]
    assert last.trajectory is not None
    last.trajectory = replace(last.trajectory, sigmas=torch.linspace(1.0, 0.1, 5))
    run = run_of(recipe_of(tmp_path))
    dump_rollout(run, mixed)
    with pytest.raises(DataError, match="another noise schedule"):
        replay(run, 1)


def test_a_dump_of_another_rollout_or_loss_is_refused(dumped: Path) -> None:
    (dumped / "r" / "1").rename(dumped / "r" / "2")
    with pytest.raises(DataError, match="holds rollout 1, not 2"):
        replay(run_of(recipe_of(dumped)), 2)
    with pytest.raises(DataError, match=r"there is no file .*r/1"):
        replay(run_of(recipe_of(dumped)), 1)
    supervised = run_of(recipe_of(dumped), needs_rollout=False)
    dump_rollout(supervised, rollout_of(number=0))
    assert len(replay(supervised, 0).samples) == 4
    with pytest.raises(DataError, match="of another loss"):
        replay(run_of(recipe_of(dumped)), 0)


def test_paths_without_their_tensors_are_refused(tmp_path: Path) -> None:
    """As a file of another hand may have them."""
    run, rollout = run_of(recipe_of(tmp_path)), rollout_of()
    rollout.samples[2].trajectory = replace(rollout.samples[2].trajectory, sigmas=[1.0, 0.0])
    dump_rollout(run, rollout)
    with pytest.raises(DataError, match="holds no groups of samples"):
        replay(run, 1)


@pytest.mark.parametrize(
    "groups", [[], [1], "many", [Group(group_index=0, prompt=None, samples=[])]]
)
def test_groups_that_are_none_are_refused(tmp_path: Path, groups: Any) -> None:
    run = run_of(recipe_of(tmp_path))
    settings = training_sampling(run.recipe)
    content = {"rollout_id": 0, "settings": settings, "groups": groups}
    write_dump(tmp_path / "r" / "0", "rollout", content)
    with pytest.raises(DataError, match="holds no groups of samples"):
        replay(run, 0)


@pytest.mark.parametrize(
    ("share", "kept"),
    [(1.0, [0, 1, 2, 3, 4]), (0.8, [0, 1, 3, 4]), (0.6, [0, 3, 4]), (0.4, [0, 4]), (0.2, [4])],
)
def test_a_share_keeps_the_first_and_the_last_groups(share: float, kept: list[int]) -> None:
    """r = int(5 share): the first r // 2 and the last ceil(r / 2)."""
    groups = [Group(group_index=n, prompt=None, samples=[]) for n in range(5)]  # type: ignore[arg-type]
    found = first_and_last(Path("dump"), groups, share)
    assert [group.group_index for group in found] == kept


def test_a_share_of_no_group_is_an_error_and_never_everything(dumped: Path) -> None:
    run = run_of(recipe_of(dumped, load_rollout_subsample=0.4))
    with pytest.raises(DataError, match=r"keeps none of the 2 groups .* at least 0\.5"):
        replay(run, 1)
    run = run_of(recipe_of(dumped, load_rollout_subsample=0.5))
    assert [group.group_index for group in replay(run, 1).groups] == [6]
    assert run.counters.images_seen == 2


def test_evaluations_have_files_of_their_own(tmp_path: Path) -> None:
    run = run_of(recipe_of(tmp_path))
    sets = {"heldout": [make_sample(reward=0.25)], "heldout/rollout_sampler": [make_sample()]}
    dump_evaluation(run, EvaluationReport(rollout_id=2, version=2, means={}, samples=sets))
    content = read_dump(tmp_path / "r" / "eval_2", "evaluation")
    assert (content["done"], content["weights"]) == (2, 2)
    assert content["sets"].keys() == sets.keys()
    assert content["sets"]["heldout"][0].reward == 0.25


def test_shards_are_written_per_rank_with_each_pair_once(tmp_path: Path) -> None:
    pairs = [make_pair(id=(n, 0), unit=n, seed=n, weight=1.0 + n) for n in range(3)]
    shards = build_shards(
        [[pair] for pair in pairs], steps=1, micro_batch_size=2, ranks=2, rollout_id=4
    )
    dump_shards(run_of(recipe_of(tmp_path)), shards)
    for rank, shard in enumerate(shards):
        content = read_dump(tmp_path / "t" / f"4_{rank}", "shard")
        assert (content["rank"], content["rollout_id"]) == (rank, 4)
        assert content["window_weights"] == [6.0]
        stored = content["pairs"]
        assert len(stored) == 2  # the second rank has a pair and filler
        rows = [[stored[n] for n in batch] for batch in content["windows"][0]]
        for got, want in zip(rows, shard.windows[0], strict=True):
            assert [(p.id, p.weight) for p in got] == [(p.id, p.weight) for p in want]
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one.tensors["visual"], other.tensors["visual"])
                assert torch.equal(one.condition.tensors["text"], other.condition.tensors["text"])


@pytest.mark.parametrize(
    ("file", "first", "fine"),
    [
        ("r/0", 0, False),
        ("r/2", 0, False),
        ("r/eval_3", 0, False),
        ("t/1_0", 0, False),
        ("r/3", 0, True),  # beyond the end
        ("r/0", 1, True),  # before the start
    ],
)
def test_a_new_run_writes_over_nothing(tmp_path: Path, file: str, first: int, fine: bool) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).touch()
    recipe = recipe_of(tmp_path)
    if fine:
        check_dump_files(recipe, first)
    else:
        with pytest.raises(BadInput, match=f"{file} exists already"):
            check_dump_files(recipe, first)
