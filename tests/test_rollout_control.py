"""Whole runs under a recipe's own functions, rewards by row, a buffer, and data of its own."""

from __future__ import annotations

import importlib
import json

import pytest
from e2e import metric_rows, run_here, same, trained_weights

from drl.errors import BadInput

STRANGERS = ("acme-recorder", "acme-functions")
QUIET = ("eval.datasets=[]", "sampling.num_steps=3")
MINE = "acme_functions"


@pytest.fixture
def functions(recorder):
    """The module of functions, with nothing seen yet."""
    module = importlib.import_module(MINE)
    module.SEEN.clear()
    return module


@pytest.fixture
def rollouts(recorder):
    return lambda: [g["rollout"] for hook, g in recorder.CALLS if hook == "drl_rollout_finished"]


def seen(functions, name):
    return [rest for kind, *rest in functions.SEEN if kind == name]


class InFlight:
    """Counts the requests that an engine works on at once."""

    def __init__(self):
        self.now = self.most = 0

    def watch(self, run):
        generate = run.engines.engine.generate

        async def counted(request):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await generate(request)
            finally:
                self.now -= 1

        run.engines.engine.generate = counted


def test_functions_of_the_recipe_make_score_mark_and_log_a_rollout(
    recipe, tmp_path, functions, rollouts, recorder
):
    in_flight = InFlight()
    recorder.REACTIONS["drl_run_started"] = in_flight.watch
    text = recipe.read_text().replace('type = "jpeg"', f'custom = "{MINE}:tone"')
    file = recipe.with_name("functions.toml")
    file.write_text(text)
    run_here(
        file,
        tmp_path / "run",
        f"rollout.function={MINE}:one_short",
        f"rollout.sample_filter={MINE}:first_removed",
        f"rollout.custom_log={MINE}:log",
        f"rollout.custom_eval_log={MINE}:eval_log",
        "rollout.dynamic_sampling_filter=zero_std",
        "rollout.over_sampling_batch_size=3",
        "rollout.server_concurrency=2",
        "reward.group=true",
        "train.num_rollout=1",
        "sampling.num_steps=3",
    )
    (rollout,) = rollouts()
    assert [len(group.samples) for group in rollout.groups] == [3, 4]  # uneven, and trained on
    assert [s.index for s in rollout.samples if s.removed] == [4]
    assert seen(functions, "log") == [[0, 7, True]]
    before, row = metric_rows(tmp_path / "run")
    assert row["mine/samples"] == row["rollout/reward/raw_num_samples"] == 7
    assert row["rollout/surplus_groups"] == 1
    assert row["rollout/reward/custom_mean"] == pytest.approx(row["rollout/reward/raw_mean"])
    assert row["rollout/reward/norm_num_samples"] == 7
    assert in_flight.most == 2
    # evaluations: the rollout's function hands them to drl's own, the log function hides their means
    assert seen(functions, "eval") == [[0, {"heldout": 3}], [1, {"heldout": 3}]]
    assert [{k for k in r if k.startswith("eval/")} for r in (before, row)] == [{"eval/mine"}] * 2
    # whole groups in training, three of them; each held-out prompt alone in an evaluation
    assert sorted(count for (count,) in seen(functions, "tone")) == [1] * 6 + [4] * 3


def test_rows_may_ask_for_their_own_reward(recipe, tmp_path, recorder, rollouts):
    prompts = tmp_path / "mixed.jsonl"
    rows = [{"input": "a"}, {"input": "b", "metadata": {"rm_type": "jpeg"}}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = f"[{{name='held', path='{prompts}', rm_type='jpeg', n_samples_per_prompt=2}}]"
    run_here(
        recipe,
        tmp_path / "run",
        f"data.prompt_data={prompts}",
        "reward.type=acme_tone",
        f"eval.datasets={held}",
        "train.num_rollout=1",
        "sampling.num_steps=3",
    )
    (rollout,) = rollouts()
    assert [set(sample.scores) for sample in rollout.samples] == [{"acme_tone"}] * 4 + [
        {"jpeg"}
    ] * 4
    reports = [g["report"] for hook, g in recorder.CALLS if hook == "drl_evaluation_finished"]
    assert [set(s.scores) for s in reports[0].samples["held"]] == [{"jpeg"}] * 4


def test_a_row_that_asks_for_no_reward_stops_the_run_before_it_begins(recipe, tmp_path, recorder):
    prompts = tmp_path / "mixed.jsonl"
    prompts.write_text('{"input": "a"}\n{"input": "b", "metadata": {"rm_type": "jpg"}}\n')
    with pytest.raises(BadInput, match=r"prompt row 2: metadata.rm_type asks for the reward 'jpg'"):
        run_here(recipe, tmp_path / "run", f"data.prompt_data={prompts}", *QUIET)
    assert "drl_weights_synced" not in [hook for hook, _ in recorder.CALLS]


def test_a_buffer_goes_through_a_resume(recipe, tmp_path, rollouts, recorder):
    sets = ("rollout.over_sampling_batch_size=3", "rollout.buffer_filter=pop_first", *QUIET)
    run_here(recipe, tmp_path / "straight", *sets, "train.num_rollout=2")
    run_here(recipe, tmp_path / "parted", *sets, "train.num_rollout=1")
    run_here(recipe, tmp_path / "parted", *sets, "train.num_rollout=2", resume=True)
    drawn = [[(g.group_index, g.prompt.row) for g in rollout.groups] for rollout in rollouts()]
    assert drawn[:2] == drawn[2:] == [[(0, 1), (1, 2)], [(3, 3), (4, 1)]]  # row 3 came back first
    assert same(trained_weights(tmp_path / "straight", 2), trained_weights(tmp_path / "parted", 2))


def test_a_function_may_find_its_own_prompts_and_leave_drls_figures_out(
    recipe, tmp_path, functions, rollouts
):
    text = recipe.read_text().replace('prompt_data = "prompts.jsonl"', "global_dataset = false")
    file = recipe.with_name("blank.toml")
    file.write_text(text)
    run_here(
        file,
        tmp_path / "run",
        f"rollout.function={MINE}:own_prompts",
        f"rollout.custom_log={MINE}:quiet_log",
        "train.num_rollout=1",
        *QUIET,
    )
    (rollout,) = rollouts()
    assert [group.prompt.text for group in rollout.groups] == ["written sign 1", "written sign 2"]
    assert seen(functions, "blank") == [[["", ""]]]
    (row,) = metric_rows(tmp_path / "run")
    assert not any(name.startswith("rollout/reward") for name in row)
    assert "train/loss" in row
