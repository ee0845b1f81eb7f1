"""``drl plugins``: list, show, doctor."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drl.testing.distributions import MINIMAL_PLUGIN, write_distribution

Drl = Callable[..., tuple[int, str, str]]
Install = Callable[[str, str], None]


def test_the_plain_list_has_owner_and_version_of_every_component(drl: Drl) -> None:
    code, out, _ = drl("plugins", "list")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert all(len(row) == 5 for row in rows)
    assert ["reward", "jpeg", "drl-reward-jpeg"] in [row[:3] for row in rows]
    assert ["logger", "jsonl", "drl-core"] in [row[:3] for row in rows]


def test_the_list_can_be_of_one_kind(drl: Drl) -> None:
    rows = drl("plugins", "list", "--kind", "reward")[1].splitlines()
    assert {row.split("\t")[0] for row in rows} == {"reward"}


def test_functions_are_listed_with_their_slot(drl: Drl) -> None:
    rows = drl("plugins", "list", "--kind", "function")[1].splitlines()
    (zero_std,) = [row for row in rows if row.startswith("function\tzero_std\tdrl-core\t")]
    assert zero_std.endswith(". (rollout.dynamic_sampling_filter)")


def test_the_list_as_json(drl: Drl, install: Install) -> None:
    install("acme-broken", "import nowhere_at_all")
    code, out, _ = drl("plugins", "list", "--json")
    listed = json.loads(out)
    assert code == 0
    assert {"kind", "name", "distribution", "version", "summary", "target", "slot"} == set(
        listed["components"][0]
    )
    slots = {c["name"]: c["slot"] for c in listed["components"]}
    assert slots["zero_std"] == "rollout.dynamic_sampling_filter"
    assert slots["jpeg"] is None
    assert listed["failures"] == [
        {
            "entry_point": "acme-broken",
            "distribution": "acme-broken",
            "version": "1.0",
            "reason": "ModuleNotFoundError: No module named 'nowhere_at_all'",
        }
    ]


def test_failed_plugins_stand_after_the_components(drl: Drl, install: Install) -> None:
    before = drl("plugins", "list")[1]
    install("acme-broken", "import nowhere_at_all")
    code, out, _ = drl("plugins", "list")
    assert code == 0
    assert out == before + (
        "failed\tacme-broken\tacme-broken\t1.0\t"
        "ModuleNotFoundError: No module named 'nowhere_at_all'\n"
    )


def test_a_terminal_gets_a_table(site: Path) -> None:
    write_distribution(site, "acme-broken", {"acme_broken.py": "1/0"}, entry_point="acme_broken")
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(site), "TERM": "xterm"}
    done = subprocess.Popen(
        [sys.executable, "-m", "drl_cli", "plugins", "list"], stdout=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    while chunk := read_or_end(ours):
        output += chunk
    assert done.wait() == 0
    text = output.decode()
    assert "\t" not in text
    assert "summary" in text
    assert "drl-reward-ocr" in text
    assert "failed to load" in text
    assert "drl plugins doctor" in text


def read_or_end(descriptor: int) -> bytes:
    """Read from a terminal; its end is an error on Linux."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "drl_cli", "plugins", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_show_names_owner_path_and_options_with_defaults(drl: Drl) -> None:
    code, out, _ = drl("plugins", "show", "reward", "jpeg")
    assert code == 0
    assert "drl_reward_jpeg.reward:JpegReward" in out
    assert "drl-reward-jpeg 0." in out
    assert 'reward.type = "jpeg"' in out
    assert "quality = 75  (int)  " in out


def test_show_of_a_component_without_options_and_with_facts(drl: Drl) -> None:
    out = drl("plugins", "show", "sde_backend", "ode")[1]
    assert "has no options" in out
    assert "has_density = False" in out


def test_show_of_a_function_says_how_it_is_called(drl: Drl) -> None:
    code, out, _ = drl("plugins", "show", "function", "zero_std")
    assert code == 0
    assert "  function  drl.builtin.functions_rollout:zero_std\n" in out
    assert '  chosen by rollout.dynamic_sampling_filter = "zero_std"\n' in out
    assert "  called as (run, group)\n" in out


def test_show_of_a_function_has_every_slot_of_its_name(drl: Drl) -> None:
    _, out, _ = drl("plugins", "show", "function", "own")
    assert [line.split()[2] for line in out.splitlines() if "chosen by" in line] == [
        "eval.function",
        "rollout.function",
    ]
    code, _, err = drl("plugins", "show", "function", "zero_sdt")
    assert code == 2
    assert "no function named 'zero_sdt' is installed" in err
    assert "did you mean 'zero_std'?" in err


def test_show_of_an_unknown_name_is_bad_input(drl: Drl) -> None:
    code, _, err = drl("plugins", "show", "reward", "jpge")
    assert code == 2
    assert err.startswith("no reward named 'jpge' is installed\n  did you mean 'jpeg'?\n")


def test_doctor_imports_the_components_of_a_distribution(drl: Drl) -> None:
    code, out, _ = drl("plugins", "doctor", "drl-sde-flow")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ok", "ok"]


def test_doctor_shows_whole_tracebacks_and_fails(drl: Drl, install: Install) -> None:
    install("acme-broken", "import nowhere_at_all")
    code, out, _ = drl("plugins", "doctor", "acme-broken")
    assert code == 1
    assert "failed  acme-broken 1.0, entry point acme-broken" in out
    assert "Traceback (most recent call last)" in out
    assert "ModuleNotFoundError: No module named 'nowhere_at_all'" in out


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("class Tone: pass", "must derive from drl.api.Reward"),
    ],
)
def test_doctor_finds_a_class_that_is_broken(
    drl: Drl, install: Install, site: Path, files: str, said: str
) -> None:
    (site / "acme_tone_reward.py").write_text(files)
    install("acme-tone", MINIMAL_PLUGIN.replace("tone.reward:", "acme_tone_reward:"))
    code, out, _ = drl("plugins", "doctor", "acme-tone")
    assert code == 1
    assert "failed  reward tone of acme-tone 1.0" in out
    assert said in out


def test_doctor_finds_what_the_contract_would(drl: Drl, install: Install, site: Path) -> None:
    (site / "acme_tone_reward.py").write_text(
        "from drl.api import Reward\nfrom drl.options import Field, Options\n"
        "class Tone(Reward):\n    async def score(self, samples): return []\n"
        "class ToneOptions(Options):\n    target: float = Field(2.0, le=1)\n"
    )
    source = MINIMAL_PLUGIN.replace("tone.reward:", "acme_tone_reward:").replace(
        "'How bright.'", "'How bright', config='acme_tone_reward:ToneOptions'"
    )
    install("acme-tone", source)
    code, out, _ = drl("plugins", "doctor", "acme-tone")
    assert code == 1
    assert "wrong   reward tone of acme-tone 1.0" in out
    assert "the summary must end with a full stop: 'How bright'" in out
    assert "option target has no description" in out
    assert "the default of option target: Input should be less than or equal to 1" in out


def test_doctor_finds_a_function_that_its_slot_cannot_call(drl: Drl, install: Install) -> None:
    install(
        "acme-slots",
        "from drl.api import Component, hookimpl\n"
        "DRL_API = (1, 0)\n"
        "def keep(groups): ...\n"
        "@hookimpl\n"
        "def drl_register_functions():\n"
        "    return [Component('keep', 'acme_slots:keep', summary='Keeps.',\n"
        "                      slot='rollout.sample_filter')]\n",
    )
    code, out, _ = drl("plugins", "doctor", "acme-slots")
    assert code == 1
    assert "failed  function keep of acme-slots 1.0" in out
    assert "acme_slots:keep takes 1 argument (groups), but is called with (run, groups)" in out


def test_doctor_of_a_stranger_is_bad_input(drl: Drl) -> None:
    code, _, err = drl("plugins", "doctor", "numpy")
    assert code == 2
    assert err.startswith("'numpy' has no plugin installed\n  installed: drl-core, ")
