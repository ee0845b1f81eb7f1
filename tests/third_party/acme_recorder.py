"""A third-party plugin that writes down every hook of a run, and answers as a test tells it to."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)

CALLS = []
"""(hook, its arguments by name), in the order of the calls."""

REACTIONS = {}
"""By hook: a function of the hook's arguments; its result is the plugin's answer."""


def note(hook, **arguments):
    CALLS.append((hook, arguments))
    reaction = REACTIONS.get(hook)
    return None if reaction is None else reaction(**arguments)


@hookimpl
def drl_register_rewards():
    return [
        Component("acme_tone", "acme_recorder_reward:Tone", summary="How bright the picture is.")
    ]


@hookimpl
def drl_default_options(recipe):
    return note("drl_default_options", recipe=recipe) or {}


@hookimpl
def drl_check_recipe(recipe):
    return note("drl_check_recipe", recipe=recipe) or []


@hookimpl
def drl_report_header(recipe):
    return note("drl_report_header", recipe=recipe) or []


@hookimpl
def drl_run_started(run):
    return note("drl_run_started", run=run)


@hookimpl
def drl_restore_state(run, state):
    return note("drl_restore_state", run=run, state=state)


@hookimpl
def drl_filter_group(run, group):
    return note("drl_filter_group", run=run, group=group)


@hookimpl
def drl_rollout_finished(run, rollout):
    return note("drl_rollout_finished", run=run, rollout=rollout)


@hookimpl
def drl_step_finished(run, report):
    return note("drl_step_finished", run=run, report=report)


@hookimpl
def drl_weights_synced(run, version):
    return note("drl_weights_synced", run=run, version=version)


@hookimpl
def drl_evaluation_finished(run, report):
    return note("drl_evaluation_finished", run=run, report=report)


@hookimpl
def drl_save_state(run):
    return note("drl_save_state", run=run)


@hookimpl
def drl_checkpoint_saved(run, path):
    return note("drl_checkpoint_saved", run=run, path=path)


@hookimpl
def drl_explain_error(error, recipe):
    return note("drl_explain_error", error=error, recipe=recipe)


@hookimpl
def drl_run_finished(run, error):
    return note("drl_run_finished", run=run, error=error)
