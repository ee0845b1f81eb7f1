"""Every hook: it reaches a plugin with its arguments, its answers are merged as its docstring says."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pluggy
import pytest

from drl import hookspecs
from drl.api import (
    CheckpointFacts,
    Claim,
    Dropped,
    EvaluationReport,
    Group,
    Problem,
    Prompt,
    Rollout,
    StepReport,
    Verdict,
)
from drl.catalog import Catalog
from drl.kinds import KINDS
from drl.plugins import load_plugins

MakePlugin = Callable[..., EntryPoint]

HOOKS: dict[str, types.FunctionType] = {
    name: value for name, value in vars(hookspecs).items() if name.startswith("drl_")
}
GROUP = Group(group_index=3, prompt=Prompt(row=0, text="x"), samples=[])
STEP = StepReport(rollout_id=1, window=0, global_step=4, metrics={"train/loss": 0.5})
EVALUATION = EvaluationReport(rollout_id=1, version=2, means={"heldout": 0.7})

# hook, its arguments, what an implementation answers
CALLS: list[tuple[str, dict[str, Any], Any]] = [
    *((kind.hook, {}, []) for kind in KINDS),
    ("drl_add_commands", {"cli": click.Group()}, None),
    (
        "drl_claim_checkpoint",
        {"checkpoint": CheckpointFacts(reference="acme/sd3-tuned")},
        Claim(family="sd3", by="name", pattern="sd3"),
    ),
    ("drl_default_options", {"recipe": "recipe"}, {"sde.num_steps": 2}),
    ("drl_check_recipe", {"recipe": "recipe"}, [Problem("sde.type", "has no density")]),
    ("drl_report_header", {"recipe": "recipe"}, ["one", "two"]),
    ("drl_run_started", {"run": "run"}, None),
    ("drl_restore_state", {"run": "run", "state": {"acme": {"count": 1}}}, None),
    ("drl_filter_group", {"run": "run", "group": GROUP}, Dropped("zero_std")),
    (
        "drl_rollout_finished",
        {"run": "run", "rollout": Rollout(rollout_id=1, version=1, groups=[GROUP])},
        None,
    ),
    ("drl_step_finished", {"run": "run", "report": STEP}, None),
    ("drl_weights_synced", {"run": "run", "version": 2}, None),
    ("drl_evaluation_finished", {"run": "run", "report": EVALUATION}, Verdict("keep", "best")),
    ("drl_save_state", {"run": "run"}, {"count": 1}),
    ("drl_checkpoint_saved", {"run": "run", "path": Path("checkpoint")}, None),
    ("drl_explain_error", {"error": OSError("no driver"), "recipe": None}, "install the driver"),
    ("drl_run_finished", {"run": "run", "error": None}, None),
]

RUN_HOOKS = [
    "drl_run_started",
    "drl_restore_state",
    "drl_filter_group",
    "drl_rollout_finished",
    "drl_step_finished",
    "drl_weights_synced",
    "drl_evaluation_finished",
    "drl_save_state",
    "drl_checkpoint_saved",
    "drl_run_finished",
]


def implementing(hook: str, answer: Any, seen: list[dict[str, Any]]) -> types.ModuleType:
    """Return a plugin module that implements one hook with all of its arguments."""
    names = list(inspect.signature(HOOKS[hook]).parameters)
    body = f"def {hook}({', '.join(names)}):\n    seen.append(locals())\n    return answer"
    module = types.ModuleType(f"plugin_of_{hook}")
    vars(module).update(seen=seen, answer=answer)
    exec(body, vars(module))
    vars(module)[hook] = pluggy.HookimplMarker("drl")(vars(module)[hook])
    return module


@pytest.mark.parametrize(("hook", "arguments", "answer"), CALLS, ids=[call[0] for call in CALLS])
def test_a_hook_gets_the_objects_and_gives_the_answer(
    hook: str, arguments: dict[str, Any], answer: Any
) -> None:
    seen: list[dict[str, Any]] = []
    manager = load_plugins(installed=[]).manager
    manager.register(implementing(hook, answer, seen))
    manager.check_pending()
    got = vars(manager.hook)[hook](**arguments)
    assert seen == [arguments]
    assert all(seen[0][name] is value for name, value in arguments.items())
    if hook == "drl_explain_error":
        assert got == answer
    else:
        assert got == ([] if answer is None else [answer])


def test_every_hook_is_called_above() -> None:
    assert [call[0] for call in CALLS] == list(HOOKS)


def test_hooks_are_in_phase_order() -> None:
    order = list(HOOKS)
    assert order[: len(KINDS)] == [kind.hook for kind in KINDS]
    assert order[len(KINDS)] == "drl_add_commands"
    assert [name for name in order if name in RUN_HOOKS] == RUN_HOOKS


def test_every_hook_has_a_docstring_and_typed_arguments() -> None:
    for name, function in HOOKS.items():
        signature = inspect.signature(function)
        assert (function.__doc__ or "").strip(), name
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, name
        assert (function.__doc__ or "").splitlines()[0].endswith((".", ".``")), name


def test_explain_error_ends_with_the_first_answer_and_all_others_ask_everyone() -> None:
    manager = load_plugins(installed=[]).manager
    for hook, arguments, _ in CALLS:
        for answer in ("one", "two"):
            manager.register(implementing(hook, answer, []), name=f"{hook} {answer}")
        got = vars(manager.hook)[hook](**arguments)
        assert (
            got in ("one", "two") if hook == "drl_explain_error" else sorted(got) == ["one", "two"]
        )


def test_an_implementation_may_leave_arguments_out(make_plugin: MakePlugin) -> None:
    source = (
        "from drl.api import Verdict, hookimpl\nDRL_API = (1, 0)\n"
        "@hookimpl\ndef drl_evaluation_finished(report): return Verdict('stop', str(report.version))\n"
    )
    catalog = Catalog.load(installed=[make_plugin("acme-judge", source)])
    answers = catalog.hooks.drl_evaluation_finished(run=None, report=EVALUATION)
    assert answers == [Verdict("stop", "2")]


def test_the_answers_of_several_plugins_are_collected(make_plugin: MakePlugin) -> None:
    source = (
        "from drl.api import Dropped, hookimpl\nDRL_API = (1, 0)\n"
        "@hookimpl\ndef drl_filter_group(group): return Dropped('small') if group.samples else None\n"
    )
    points = [make_plugin("acme-a", source), make_plugin("acme-b", source)]
    catalog = Catalog.load(installed=points)
    assert catalog.hooks.drl_filter_group(run=None, group=GROUP) == []
    full = Group(group_index=0, prompt=GROUP.prompt, samples=[object()])  # type: ignore[list-item]
    assert catalog.hooks.drl_filter_group(run=None, group=full) == [Dropped("small")] * 2
