"""Run-phase hooks of a third-party plugin: which, when, how often, with what, over a resume too."""

from __future__ import annotations

import signal
import threading

import pytest
from e2e import metric_rows, run_here, summary_of
from third_party_plugins import fresh_recorder

from drl.catalog import Catalog
from drl.checkpoint import damage
from drl.errors import ContractError, Interrupted, Problem, RecipeError
from drl.hookspecs import __dict__ as hookspecs
from drl.interfaces.engine import CLIENTS
from drl.launch import run_recipe
from drl.observe.directory import RunDirectory
from drl.types import Dropped, Prompt, Verdict
from drl_cli.main import execute

STRANGERS = ("acme-recorder",)
RECIPE_HOOKS = ["drl_default_options", "drl_check_recipe", "drl_report_header"]
ITERATION = [
    *["drl_filter_group"] * 2,
    "drl_rollout_finished",
    *["drl_step_finished"] * 2,
    "drl_save_state",
    "drl_checkpoint_saved",
    "drl_weights_synced",
    "drl_evaluation_finished",
]
SHORT = ("train.num_rollout=1", "checkpoint.save_interval=1")
EVERYTHING = (
    "train.num_steps_per_rollout=2",
    "checkpoint.save_interval=1",
    "checkpoint.asynchronous=false",  # else a save is told of at the save point after it
    "eval.interval=1",
)


@pytest.fixture(scope="module")
def recorded(lab):
    """All calls of a run of two iterations, those of its resume for a third, and what hooks found."""
    found = []
    Catalog.load()
    recorder = fresh_recorder()
    recorder.REACTIONS["drl_save_state"] = lambda run: {"calls": len(recorder.CALLS)}
    recorder.REACTIONS["drl_run_started"] = lambda run: found.append(what_exists(run))
    recorder.REACTIONS["drl_checkpoint_saved"] = lambda run, path: found.append(state_of(path))
    run_here(lab / "tiny.toml", lab / "recorded", "train.num_rollout=2", *EVERYTHING)
    first = list(recorder.CALLS)
    recorder.CALLS.clear()
    run_here(lab / "tiny.toml", lab / "recorded", "train.num_rollout=3", *EVERYTHING, resume=True)
    return first, list(recorder.CALLS), found


def what_exists(run):
    return run.directory.recipe.is_file(), run.engines.handle


def state_of(path):
    partial = list(path.parent.glob(".*"))
    tracker = (path.parent / "latest_checkpointed_iteration.txt").read_text().strip()
    return path.name, damage(path), partial, tracker


def names(calls):
    return [hook for hook, _ in calls if hook not in RECIPE_HOOKS]


def arguments(calls, hook):
    return [given for name, given in calls if name == hook]


def test_hooks_come_in_the_documented_order_and_number(recorded):
    first = recorded[0]
    start = ["drl_run_started", "drl_weights_synced", "drl_evaluation_finished"]
    assert names(first) == [*start, *ITERATION, *ITERATION, "drl_run_finished"]


def test_every_hook_of_a_run_is_recorded(recorded):
    first, resumed, _ = recorded
    declared = {name for name in hookspecs if name.startswith("drl_")}
    outside = {name for name in declared if name.startswith("drl_register_")}
    outside |= {"drl_add_commands", "drl_claim_checkpoint", "drl_explain_error"}
    assert {hook for hook, _ in [*first, *resumed]} == declared - outside


def test_arguments_are_those_of_the_specification(recorded):
    for hook, given in recorded[1]:
        code = hookspecs[hook].__code__
        assert list(given) == list(code.co_varnames[: code.co_argcount]), hook


def test_every_hook_of_a_run_gets_the_same_run(recorded):
    assert len({id(given["run"]) for _, given in recorded[0] if "run" in given}) == 1


def test_versions_steps_and_evaluations_count_up(recorded):
    first, resumed, _ = recorded
    both = [*first, *resumed]
    assert [given["version"] for given in arguments(first, "drl_weights_synced")] == [0, 1, 2]
    assert [given["version"] for given in arguments(resumed, "drl_weights_synced")] == [2, 3]
    reports = [given["report"] for given in arguments(both, "drl_step_finished")]
    assert [(r.rollout_id, r.window, r.global_step) for r in reports] == [
        (k // 2, k % 2, k) for k in range(6)
    ]
    evaluations = [given["report"] for given in arguments(both, "drl_evaluation_finished")]
    assert [(report.rollout_id, report.version) for report in evaluations] == [
        (k, k) for k in range(4)
    ]
    assert all(len(report.samples["heldout"]) == 3 for report in evaluations)


def test_groups_arrive_scored_and_rollouts_whole(recorded):
    groups = [given["group"] for given in arguments(recorded[0], "drl_filter_group")]
    assert sorted(group.group_index for group in groups) == [0, 1, 2, 3]
    assert all(sample.reward is not None for group in groups for sample in group.samples)
    rollouts = [given["rollout"] for given in arguments(recorded[0], "drl_rollout_finished")]
    assert [rollout.rollout_id for rollout in rollouts] == [0, 1]
    assert [[g.group_index for g in rollout.groups] for rollout in rollouts] == [[0, 1], [2, 3]]


def test_a_run_starts_with_its_directory_and_without_an_engine(recorded):
    assert [row for row in recorded[2] if len(row) == 2] == [(True, None)] * 2


def test_a_checkpoint_is_announced_when_it_is_in_place_and_whole(recorded):
    assert [row for row in recorded[2] if len(row) == 4] == [
        (f"iter_{n:07d}", None, [], str(n)) for n in (1, 2, 3)
    ]


def test_state_comes_back_under_the_name_of_the_distribution(recorded):
    first, resumed, _ = recorded
    ((hook, given),) = [call for call in resumed if call[0] == "drl_restore_state"]
    saved = [place for place, (name, _) in enumerate(first) if name == "drl_save_state"]
    assert given["state"] == {"acme-recorder": {"calls": saved[-1] + 1}}
    assert names(resumed)[:3] == ["drl_run_started", hook, "drl_weights_synced"]


def test_success_ends_without_an_error(recorded):
    assert [given["error"] for given in arguments(recorded[0], "drl_run_finished")] == [None]


FAILING = [
    "drl_run_started",
    "drl_filter_group",
    "drl_rollout_finished",
    "drl_step_finished",
    "drl_weights_synced",
    "drl_evaluation_finished",
    "drl_save_state",
    "drl_checkpoint_saved",
    "drl_run_finished",
]


@pytest.mark.parametrize("hook", FAILING)
def test_a_hook_that_fails_stops_the_run_and_its_plugin_is_named(recipe, tmp_path, recorder, hook):
    failure = ValueError(f"{hook} has had enough")

    def fail(**given):
        raise failure

    recorder.REACTIONS[hook] = fail
    with pytest.raises(ValueError, match="has had enough") as caught:
        run_here(recipe, tmp_path / "run", *SHORT)
    # where there is a checkpoint already, the way back stands below
    assert caught.value.__notes__[0] == f"raised by acme-recorder 1.0 in its hook {hook}"
    assert names(recorder.CALLS)[-1] == "drl_run_finished"
    ended = None if hook == "drl_run_finished" else failure
    assert recorder.CALLS[-1][1]["error"] is ended
    assert CLIENTS == {}  # the engine was stopped
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drl-")]
    with RunDirectory.open(tmp_path / "run"):
        pass  # the lock is free


def test_the_command_line_shows_plugin_hook_and_hint(recipe, tmp_path, recorder, capfd):
    def fail(**given):
        raise ValueError("no disk")

    recorder.REACTIONS["drl_step_finished"] = fail
    recorder.REACTIONS["drl_explain_error"] = lambda error, recipe: f"buy one ({error})"
    assert execute(["run", str(recipe), "--run-dir", str(tmp_path / "run")]) == 1
    shown = capfd.readouterr().err
    assert "raised by acme-recorder 1.0 in its hook drl_step_finished" in shown
    assert "buy one (no disk)" in shown
    assert "Traceback" not in shown


def test_an_interrupt_reaches_the_last_hook(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_rollout_finished"] = lambda **_: signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted):
        run_here(recipe, tmp_path / "run")
    assert isinstance(recorder.CALLS[-1][1]["error"], Interrupted)


def test_a_failure_says_how_the_run_goes_on_once_there_is_a_checkpoint(
    recipe, tmp_path, recorder, capfd
):
    def fail(run, report):
        if report.rollout_id == failing:
            raise RuntimeError("no disk")

    recorder.REACTIONS["drl_step_finished"] = fail
    words = ["--set", "eval.datasets=[]", "--set", "checkpoint.save_interval=1"]
    words += ["--set", "checkpoint.asynchronous=false"]
    for failing, told in ((0, False), (1, True)):
        run_dir = tmp_path / f"run-{failing}"
        assert execute(["run", str(recipe), "--run-dir", str(run_dir), *words]) == 1
        line = f"go on from the last checkpoint with: drl run RECIPE --resume --run-dir {run_dir}"
        assert (line in capfd.readouterr().err) == told


def test_state_that_json_cannot_hold_names_the_plugin(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_save_state"] = lambda run: {"best": Prompt(row=1, text="x")}
    with pytest.raises(ContractError, match=r"acme-recorder: drl_save_state .* JSON"):
        run_here(recipe, tmp_path / "run", *SHORT)


def test_suggested_options_stand_below_the_recipe_file(recipe, tmp_path, recorder):
    suggestions = {"trust.max_bad_steps": 7, "optimizer.lr": 0.5}
    recorder.REACTIONS["drl_default_options"] = lambda recipe: suggestions
    run_here(recipe, tmp_path / "heard", *SHORT, "reward.type=acme_tone")
    run = arguments(recorder.CALLS, "drl_run_started")[0]["run"]
    assert (run.recipe.trust.max_bad_steps, run.recipe.optimizer.lr) == (7, 1e-3)
    assert "max_bad_steps = 7" in (tmp_path / "heard" / "recipe.toml").read_text()


def test_an_error_found_by_a_plugin_stops_before_anything_is_written(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_check_recipe"] = lambda recipe: [
        Problem("optimizer.lr", f"is {recipe.optimizer.lr}, which acme does not like"),
        Problem("train.seed", "is no lucky number", severity="warning"),
    ]
    with pytest.raises(RecipeError, match=r"optimizer\.lr +is 0\.001, which acme does not like"):
        run_here(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert "drl_run_started" not in names(recorder.CALLS)


def test_warnings_and_header_lines_of_a_plugin_are_shown(recipe, recorder):
    from drl.errors import Problem

    recorder.REACTIONS["drl_check_recipe"] = lambda recipe: [
        Problem("train.seed", "is no lucky number", severity="warning")
    ]
    recorder.REACTIONS["drl_report_header"] = lambda recipe: ["acme says hello", "and goodbye"]
    lines = []
    run_recipe(recipe, dry_run=True, catalog=Catalog.load(), echo=lines.append)
    assert any("train.seed" in line and "is no lucky number" in line for line in lines)
    assert lines[-2:] == ["acme says hello", "and goodbye"]


def verdict_after(done, action):
    """Return a reaction that gives its verdict on the weights after ``done`` iterations."""
    answer = Verdict(action, "acme has seen enough")
    return lambda run, report: answer if report.rollout_id == done else None


@pytest.mark.parametrize("done", [0, 2])
def test_stop_ends_the_run_well_after_that_iteration(recipe, tmp_path, recorder, done):
    recorder.REACTIONS["drl_evaluation_finished"] = verdict_after(done, "stop")
    run_dir = tmp_path / "run"
    lines = run_here(recipe, run_dir, "train.num_rollout=9", "eval.interval=1")
    last = max(done, 1)
    assert [row["step"] for row in metric_rows(run_dir)] == list(range(-1, last))
    assert recorder.CALLS[-1][1]["error"] is None
    saved = [given["path"].name for given in arguments(recorder.CALLS, "drl_checkpoint_saved")]
    assert saved == [f"iter_{last:07d}"]
    summary = summary_of(run_dir)
    assert (summary["heldout"]["images"], summary["iterations"]) == (3, last)
    assert any("held-out reward" in line for line in lines)
    assert len(arguments(recorder.CALLS, "drl_evaluation_finished")) == last + 1


def test_a_verdict_that_a_kill_came_before_ends_the_resumed_run_as_well(recipe, tmp_path, recorder):
    sets = ("train.num_rollout=9", "checkpoint.save_interval=1", "eval.interval=1")

    def die(run, report):
        if report.rollout_id == 2:
            raise MemoryError("as good as a kill")

    recorder.REACTIONS["drl_evaluation_finished"] = die
    with pytest.raises(MemoryError):
        run_here(recipe, tmp_path / "run", *sets)
    recorder.REACTIONS["drl_evaluation_finished"] = verdict_after(2, "stop")
    run_here(recipe, tmp_path / "run", *sets, resume=True)
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == [-1, 0, 1]
    assert (summary_of(tmp_path / "run")["iterations"], recorder.CALLS[-1][1]["error"]) == (2, None)


def test_a_run_that_a_verdict_ended_exits_as_success_and_can_go_on(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_evaluation_finished"] = verdict_after(1, "stop")
    common = ["--set", "train.num_rollout=3", "--set", "eval.interval=1"]
    command = ["run", str(recipe), "--run-dir", str(tmp_path / "run"), *common]
    assert execute(command) == 0
    assert execute([*command, "--resume"]) == 0
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == [-1, 0, 1, 2]


def test_keep_saves_the_iteration_and_names_it_with_the_reason(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_evaluation_finished"] = lambda run, report: Verdict(
        "keep", f"best\nof {report.rollout_id}"
    )
    run_here(recipe, tmp_path / "run", "train.num_rollout=3", "eval.interval=2")
    kept = (tmp_path / "run" / "checkpoints" / "kept.txt").read_text().splitlines()
    assert kept == ["iter_0000002  best of 2", "iter_0000003  best of 3"]
    folders = [line.split()[0] for line in kept]
    assert all(damage(tmp_path / "run" / "checkpoints" / name) is None for name in folders)


def test_an_unknown_verdict_is_refused(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_evaluation_finished"] = verdict_after(0, "pause")
    with pytest.raises(ContractError, match="'keep' or 'stop', got 'pause'"):
        run_here(recipe, tmp_path / "run")


def test_hooks_of_a_switched_off_plugin_stay_silent(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_filter_group"] = lambda run, group: Dropped("all")
    arguments = ["--without", "acme-recorder", "run", str(recipe), "--dry-run"]
    assert execute(arguments) == 0
    assert recorder.CALLS == []
