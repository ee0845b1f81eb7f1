"""Loading: each plugin alone, failures kept, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from drl.errors import BadInput
from drl.plugins import load_plugins, normalized, owner_of, place_of
from drl.testing.distributions import MINIMAL_PLUGIN as REWARD

MakePlugin = Callable[..., EntryPoint]


def reasons(*points: EntryPoint) -> list[str]:
    return [failure.reason for failure in load_plugins(installed=points).failures]


def test_a_sound_plugin_is_offered_with_owner_and_version(make_plugin: MakePlugin) -> None:
    plugins = load_plugins(installed=[make_plugin("acme-tone", REWARD, version="2.1")])
    (entry,) = plugins.entries
    assert (entry.kind, entry.component.name, entry.owner) == ("reward", "tone", "acme-tone 2.1")
    assert plugins.failures == []


def test_a_plugin_that_fails_to_import_leaves_the_others_alone(make_plugin: MakePlugin) -> None:
    broken = make_plugin("acme-broken", "import cosmos_guardrail_that_is_absent")
    plugins = load_plugins(installed=[broken, make_plugin("acme-tone", REWARD)])
    assert [entry.component.name for entry in plugins.entries] == ["tone"]
    (failure,) = plugins.failures
    assert failure.owner == "acme-broken 1.0"
    assert failure.reason == (
        "ModuleNotFoundError: No module named 'cosmos_guardrail_that_is_absent'"
    )


@pytest.mark.parametrize(
    "body",
    ["raise SystemExit(3)", "1 / 0", "raise Exception", "def broken(:", "raise KeyError('x')"],
)
def test_whatever_an_import_raises_is_recorded(make_plugin: MakePlugin, body: str) -> None:
    assert len(reasons(make_plugin("acme-broken", body))) == 1


def test_a_module_that_does_not_exist_is_recorded(make_plugin: MakePlugin) -> None:
    point = make_plugin("acme-absent", REWARD, entry_point="acme_nowhere.plugin")
    assert reasons(point) == ["ModuleNotFoundError: No module named 'acme_nowhere'"]


def test_a_missing_api_version_says_which_line_to_add(make_plugin: MakePlugin) -> None:
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace("DRL_API = (1, 0)", "")))
    assert "add the line  DRL_API = (1, 0)" in reason


@pytest.mark.parametrize("stated", ["(2, 0)", "(0, 9)", "(1, 1)"])
def test_another_api_version_is_refused(make_plugin: MakePlugin, stated: str) -> None:
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace("(1, 0)", stated)))
    theirs = stated.strip("()").replace(", ", ".")
    assert f"is for plugin interface {theirs}, this drl has 1.0" in reason


@pytest.mark.parametrize("stated", ["'1.0'", "1", "(1,)", "('1', '0')"])
def test_an_api_version_of_another_shape_is_refused(make_plugin: MakePlugin, stated: str) -> None:
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace("(1, 0)", stated)))
    assert "write it as  DRL_API = (1, 0)" in reason


def test_a_misspelt_hook_is_refused_with_the_nearest_name(make_plugin: MakePlugin) -> None:
    body = REWARD.replace("drl_register_rewards", "drl_register_reward")
    plugins = load_plugins(installed=[make_plugin("acme-tone", body)])
    assert plugins.entries == []
    assert plugins.failures[0].reason == (
        "ContractError: there is no hook 'drl_register_reward'; did you mean 'drl_register_rewards'?"
    )


def test_a_hook_of_no_known_name_points_to_the_list(make_plugin: MakePlugin) -> None:
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace("drl_register_rewards", "qqqq")))
    assert "there is no hook 'qqqq'; docs/hooks.md has the list" in reason


def test_a_hook_without_its_marker_is_refused(make_plugin: MakePlugin) -> None:
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace("@hookimpl", "")))
    assert "'drl_register_rewards' has the name of a hook but no @hookimpl" in reason


def test_an_argument_that_a_hook_does_not_have_is_refused(make_plugin: MakePlugin) -> None:
    body = REWARD + "\n@hookimpl\ndef drl_weights_synced(run, revision): ...\n"
    plugins = load_plugins(installed=[make_plugin("acme-tone", body)])
    assert plugins.entries == []
    assert "revision" in str(plugins.failures[0].error)


def test_a_refused_plugin_takes_part_in_no_hook(make_plugin: MakePlugin) -> None:
    body = (
        REWARD.replace("'tone'", "'Tone'")
        + "\n@hookimpl\ndef drl_report_header(recipe): return 'x'\n"
    )
    plugins = load_plugins(installed=[make_plugin("acme-tone", body)])
    assert plugins.manager.hook.drl_report_header(recipe=None) == []
    assert plugins.owners == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("'tone'", "'Tone'", "the name 'Tone' must be lower_snake"),
        ("'tone'", "'to-ne'", "the name 'to-ne' must be lower_snake"),
        ("tone.reward:Tone", "tone.reward.Tone", "must read 'module:Class'"),
        ("summary='How bright.'", "summary=' '", "needs a summary"),
        ("summary='How bright.'", "summary='x', config='no colon'", "must read 'module:Options'"),
        ("[Component", "['tone'] or [Component", "must answer with Component values, got 'tone'"),
        ("return [", "return None and [", "not iterable"),
        ("return [", "return 1 / 0 or [", "ZeroDivisionError"),
    ],
)
def test_a_malformed_component_is_a_failure_of_its_plugin(
    make_plugin: MakePlugin, old: str, new: str, said: str
) -> None:
    assert old in REWARD
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace(old, new)))
    assert said in reason


def test_one_plugin_cannot_offer_a_name_twice_in_a_section(make_plugin: MakePlugin) -> None:
    body = REWARD + (
        "\n@hookimpl\ndef drl_register_losses(): return [Component('x', 'a:B', summary='X.')]"
        "\n@hookimpl\ndef drl_register_advantages(): return [Component('x', 'a:C', summary='X.')]\n"
    )
    (reason,) = reasons(make_plugin("acme-tone", body))
    assert "offers 'x' twice for the section [algorithm]" in reason


def test_an_entry_point_must_name_a_module(make_plugin: MakePlugin) -> None:
    point = make_plugin("acme-tone", REWARD, entry_point="acme_tone.plugin:DRL_API")
    assert "must name a module" in reasons(point)[0]


def test_two_entry_points_of_one_module_load_it_once(make_plugin: MakePlugin) -> None:
    point = make_plugin("acme-tone", REWARD)
    again = make_plugin("acme-zone", "", entry_point=point.value)
    plugins = load_plugins(installed=[point, again])
    assert len(plugins.entries) == 1
    assert len(plugins.failures) == 1


def test_a_half_removed_distribution_is_one_failure(make_plugin: MakePlugin) -> None:
    point = make_plugin("acme-tone", "raise ImportError('gone')")
    dist = point.dist
    assert dist is not None
    (Path(str(dist.locate_file(""))) / "acme_tone-1.0.dist-info" / "METADATA").unlink()
    assert owner_of(point)[0] == f"unknown ({point.value})"
    assert len(load_plugins(installed=[point]).failures) == 1


def test_a_switched_off_distribution_is_not_even_imported(make_plugin: MakePlugin) -> None:
    point = make_plugin("acme-broken", "1 / 0")
    plugins = load_plugins(["Acme.Broken"], installed=[point, make_plugin("acme-tone", REWARD)])
    assert plugins.failures == []
    assert plugins.off == ("acme-broken",)
    assert [entry.component.name for entry in plugins.entries] == ["tone"]


def test_the_variable_switches_off_too(
    make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRL_PLUGINS_OFF", " acme-tone, gone-long-ago ,")
    assert load_plugins(installed=[make_plugin("acme-tone", REWARD)]).entries == []


def test_switching_off_a_stranger_is_refused(make_plugin: MakePlugin) -> None:
    with pytest.raises(BadInput, match="--without acme-tune") as caught:
        load_plugins(["acme-tune"], installed=[make_plugin("acme-tone", REWARD)])
    assert "installed: acme-tone" in str(caught.value)


@pytest.mark.parametrize("name", ["drl-reward-ocr", "DRL_Reward.ocr", "drl--reward__ocr"])
def test_distribution_names_compare_as_on_an_index(name: str) -> None:
    assert normalized(name) == "drl-reward-ocr"


def test_an_error_in_a_hook_names_the_plugin(make_plugin: MakePlugin) -> None:
    body = REWARD + "\n@hookimpl\ndef drl_weights_synced(version): return helper(version)"
    body += "\ndef helper(version): raise OSError('offline')\n"
    quiet = REWARD.replace("'tone'", "'other'")
    quiet += "\n@hookimpl\ndef drl_weights_synced(version): return None\n"
    points = [make_plugin("acme-tone", body), make_plugin("acme-quiet", quiet)]
    plugins = load_plugins(installed=points)
    with pytest.raises(OSError, match="offline") as caught:
        plugins.manager.hook.drl_weights_synced(run=None, version=1)
    assert caught.value.__notes__ == ["raised by acme-tone 1.0 in its hook drl_weights_synced"]


def test_asking_keeps_the_owner_of_each_answer(make_plugin: MakePlugin) -> None:
    body = "\n@hookimpl\ndef drl_save_state(): return {'count': 3}\n"
    silent = "\n@hookimpl\ndef drl_save_state(run): return None\n"
    plugins = load_plugins(
        installed=[
            make_plugin("acme-zeta", REWARD + body),
            make_plugin("acme-beta", REWARD + body),
            make_plugin("acme-mute", REWARD + silent),
        ]
    )
    answers = plugins.ask("drl_save_state", {"run": None})
    assert answers == [("acme-beta", {"count": 3}), ("acme-zeta", {"count": 3})]


def test_an_error_while_asking_names_the_plugin(make_plugin: MakePlugin) -> None:
    body = REWARD + "\n@hookimpl\ndef drl_save_state(run): raise OddError('odd')\n"
    body += "class OddError(Exception): pass\n"
    plugins = load_plugins(installed=[make_plugin("acme-tone", body)])
    with pytest.raises(Exception, match="odd") as caught:
        plugins.ask("drl_save_state", {"run": None})
    assert caught.value.__notes__ == ["raised by acme-tone 1.0 in its hook drl_save_state"]


def test_a_failure_without_text_still_has_a_reason(make_plugin: MakePlugin) -> None:
    assert reasons(make_plugin("acme-tone", "raise ValueError")) == ["ValueError"]


def test_the_order_of_installation_changes_nothing(make_plugin: MakePlugin) -> None:
    header = REWARD + "\n@hookimpl\ndef drl_report_header(recipe): return ['{0}']\n"
    points = [
        make_plugin(f"acme-{name}", header.format(name).replace("'tone'", f"'tone_{name}'"))
        for name in "cab"
    ]
    found = [load_plugins(installed=order) for order in (points, points[::-1], sorted(points))]
    for plugins in found:
        assert [entry.distribution for entry in plugins.entries] == ["acme-a", "acme-b", "acme-c"]
        answers = plugins.ask("drl_report_header", {"recipe": None})
        assert answers == [("acme-a", ["a"]), ("acme-b", ["b"]), ("acme-c", ["c"])]
        assert list(plugins.owners) == ["acme-a:acme-a", "acme-b:acme-b", "acme-c:acme-c"]


@pytest.mark.parametrize(
    "listed", ["acme-tone,", " ,Acme_Tone , ", "other,acme.tone", ",,acme-tone"]
)
def test_the_variable_is_a_list_with_blanks_and_strangers(
    make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("DRL_PLUGINS_OFF", listed)
    plugins = load_plugins(installed=[make_plugin("acme-tone", REWARD)])
    assert (plugins.entries, plugins.off) == ([], ("acme-tone",))


@pytest.mark.parametrize("listed", ["", " ", ",", "acme"])
def test_a_list_that_names_nothing_switches_nothing_off(
    make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("DRL_PLUGINS_OFF", listed)
    plugins = load_plugins(off=["", ""], installed=[make_plugin("acme-tone", REWARD)])
    assert (len(plugins.entries), plugins.off) == (1, ())


@pytest.mark.parametrize("stated", ["(1, '0')", "('1', 0)", "(1, 0, 0)", "[1, 0]", "(1.0, 0)"])
def test_an_api_version_is_two_whole_numbers(make_plugin: MakePlugin, stated: str) -> None:
    (reason,) = reasons(make_plugin("acme-tone", REWARD.replace("(1, 0)", stated)))
    assert f"has DRL_API = {stated}; write it as  DRL_API = (1, 0)" in reason


def test_a_reason_is_the_first_line_that_says_something(make_plugin: MakePlugin) -> None:
    body = "raise ImportError('\\n\\n  no driver found\\n  install one\\n')"
    assert reasons(make_plugin("acme-tone", body)) == ["ImportError: no driver found"]


def test_a_function_that_is_only_imported_is_no_forgotten_hook(make_plugin: MakePlugin) -> None:
    files = {"acme_tone/other.py": "def drl_report_header(recipe): return 'x'\n"}
    body = REWARD + "\nfrom acme_tone.other import drl_report_header\n"
    assert reasons(make_plugin("acme-tone", body, files=files)) == []


FUNCTIONS = """
from drl.api import Component, hookimpl

DRL_API = (1, 0)

@hookimpl
def drl_register_functions():
    return [{components}]
"""


def offer(name: str = "keep", slot: str = "'rollout.sample_filter'", more: str = "") -> str:
    return f"Component('{name}', 'acme_slots.parts:keep', summary='Keeps.', slot={slot}{more})"


def test_a_function_is_offered_for_its_slot(make_plugin: MakePlugin) -> None:
    both = f"{offer()}, {offer(slot=repr('rollout.buffer_filter'))}"
    plugins = load_plugins(installed=[make_plugin("acme-slots", FUNCTIONS.format(components=both))])
    assert [f.reason for f in plugins.failures] == []
    assert [(e.kind, e.component.name, e.component.slot) for e in plugins.entries] == [
        ("function", "keep", "rollout.sample_filter"),
        ("function", "keep", "rollout.buffer_filter"),
    ]
    assert [place_of(entry) for entry in plugins.entries] == [
        "rollout.sample_filter",
        "rollout.buffer_filter",
    ]


@pytest.mark.parametrize(
    ("components", "said"),
    [
        (offer(slot="None"), "'keep' has the slot None; it must be one of model.backend, rollout."),
        (offer(slot="'rollout.filter'"), "'keep' has the slot 'rollout.filter'; it must be one of"),
        (offer(more=", config='a:B'"), "'keep' has a config, but functions have no options"),
        (f"{offer()}, {offer()}", "it offers 'keep' twice for rollout.sample_filter"),
    ],
)
def test_a_function_without_a_right_slot_is_left_out(
    make_plugin: MakePlugin, components: str, said: str
) -> None:
    source = FUNCTIONS.format(components=components)
    plugins = load_plugins(installed=[make_plugin("acme-slots", source)])
    (failure,) = plugins.failures
    assert said in failure.reason
    assert plugins.entries == []


def test_only_functions_have_slots(make_plugin: MakePlugin) -> None:
    source = FUNCTIONS.format(components=offer()).replace("_functions", "_rewards")
    (failure,) = load_plugins(installed=[make_plugin("acme-slots", source)]).failures
    assert (
        "only functions have one, and they are offered by drl_register_functions" in failure.reason
    )
