"""What the commands write: values, warnings, tables, lists of plugins, and nothing that acts in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from drl.testing.distributions import MINIMAL_PLUGIN
from drl_cli.config import flattened
from drl_cli.main import COMMANDS, execute
from drl_cli.session import Session

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")

Drl = Callable[..., tuple[int, str, str]]
Install = Callable[[str, str], None]

TONE_REWARD = """
from drl.api import Reward
class Tone(Reward):
    async def score(self, samples): return []
"""


@pytest.fixture
def tone(install: Install, site: Path) -> Callable[[str], None]:
    """Install a reward with this option model; its class is sound."""

    def write(options: str) -> None:
        (site / "acme_tone_parts.py").write_text(
            "from drl.options import Field, Options\n" + TONE_REWARD + options
        )
        source = MINIMAL_PLUGIN.replace("tone.reward:", "acme_tone_parts:").replace(
            "'How bright.'", "'How bright.', config='acme_tone_parts:ToneOptions'"
        )
        install("acme-tone", source)

    return write


def test_warnings_go_to_standard_error_and_leave_the_answer_alone(drl: Drl) -> None:
    code, out, err = drl("config", "check", QUICKSTART, "--set", "train.micro_batch_size=7")
    assert (code, out) == (0, f"{QUICKSTART} is valid\n")
    assert "train.micro_batch_size" in err
    assert "B9" in err


def test_values_are_shown_as_json_with_their_own_letters(drl: Drl) -> None:
    settings = ["run.name=a", 'sampling.negative_prompt="żółw \\"🐢\\"\\n"', "sync.verify=off"]
    flags = [word for setting in settings for word in ("--set", setting)]
    code, out, err = drl("config", "show", QUICKSTART, *flags)
    assert code == 0, err
    values = dict(line.split(" = ", 1) for line in out.splitlines())
    assert values["sampling.negative_prompt"] == '"żółw \\"🐢\\"\\n"'
    assert json.loads(values["sync.verify"]) == "off"
    assert json.loads(values["eval.datasets"])[0]["name"]
    assert "\t" not in out


def test_later_settings_win_and_an_override_wins_over_them(drl: Drl, tmp_path: Path) -> None:
    twice = ("--set", "train.seed=1", "--set", "train.seed=2")
    assert "train.seed = 2\n" in drl("config", "show", QUICKSTART, *twice)[1]
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  seed: 3\n")
    code, out, _ = drl("config", "show", QUICKSTART, *twice, "--override", str(file), "--origin")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("train.seed = ")]
    assert line == "train.seed = 3\tmine.yaml"


@pytest.mark.parametrize("command", ["config check", "config show", "plan", "run"])
def test_an_override_that_is_not_there_is_bad_input_for_every_command(
    drl: Drl, command: str, tmp_path: Path
) -> None:
    code, _, err = drl(*command.split(), QUICKSTART, "--override", str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml' does not exist" in err
    code, _, err = drl(*command.split(), str(tmp_path))
    assert code == 2
    assert "is a directory" in err


def test_a_whole_recipe_can_be_read_back_by_a_toml_parser(drl: Drl) -> None:
    out = drl("config", "show", QUICKSTART, "--toml", "--set", "run.name=x")[1]
    assert tomllib.loads(out)["run"]["name"] == "x"
    assert out.endswith("\n")
    assert not out.endswith("\n\n")


def test_tables_are_flattened_in_their_order_and_empty_ones_are_values() -> None:
    table = {"b": {"y": 1, "x": {"z": [1]}}, "a": {}, "c": None}
    assert list(flattened(table)) == [("b.y", 1), ("b.x.z", [1]), ("a", {}), ("c", None)]
    assert list(flattened({})) == []


def test_an_empty_path_explains_the_sections(drl: Drl) -> None:
    code, out, _ = drl("config", "explain", "")
    assert code == 0
    assert out.startswith("[run]  ")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "class ToneOptions(Options):\n    target: float\n",
            "target required  (float)",
        ),
        (
            "class ToneOptions(Options):\n    names: tuple[str, ...] = Field((), description='Words.')\n",
            "names = ()  (tuple[str, ...])  Words.",
        ),
        (
            "class ToneOptions(Options):\n    a: int | None = Field(None, description='[bold]Half.')\n",
            "a = None  (int | None)  [bold]Half.",
        ),
        (
            "class ToneOptions(Options):\n    a: list[int] = Field(default_factory=lambda: [1])\n",
            "a = [1]  (list[int])",
        ),
    ],
)
def test_an_option_of_a_component_is_one_line(
    drl: Drl, tone: Callable[[str], None], options: str, line: str
) -> None:
    tone(options)
    code, out, _ = drl("plugins", "show", "reward", "tone")
    assert code == 0
    assert out.splitlines() == [
        "reward tone: How bright.",
        "  from      acme-tone 1.0",
        "  class     acme_tone_parts:Tone",
        '  chosen by reward.type = "tone"',
        "  options in [reward.tone]:",
        f"    {line}",
    ]


def test_a_component_whose_options_do_not_load_is_named(
    drl: Drl, tone: Callable[[str], None]
) -> None:
    tone("class ToneOptions: pass\n")
    code, _, err = drl("plugins", "show", "reward", "tone")
    assert code == 1
    assert "acme_tone_parts:ToneOptions must derive from drl.options.Options" in err


@pytest.mark.parametrize("name", ["Acme_Tone", "acme.tone", "ACME-TONE"])
def test_a_distribution_may_be_written_as_pip_takes_it(
    drl: Drl, tone: Callable[[str], None], name: str
) -> None:
    tone("class ToneOptions(Options):\n    a: int = Field(1, description='One.')\n")
    code, out, _ = drl("plugins", "doctor", name)
    assert (code, out) == (0, "ok      reward tone of acme-tone 1.0\n")
    assert "tone" not in drl("--without", name, "plugins", "list")[1]


def test_the_doctor_looks_at_everything_and_fails_for_one(
    drl: Drl, tone: Callable[[str], None], install: Install
) -> None:
    tone("class ToneOptions(Options):\n    a: int = Field(1, description='One.')\n")
    install("acme-broken", "raise RuntimeError('no driver\\ninstall one')")
    code, out, _ = drl("plugins", "doctor")
    assert code == 1
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert heads[0] == "failed  acme-broken 1.0, entry point acme-broken"
    assert {head.split()[0] for head in heads[1:]} == {"ok"}
    assert len(heads) > 15
    assert "    RuntimeError: no driver" in out.splitlines()


def test_switching_off_several_plugins_and_a_stranger(drl: Drl) -> None:
    code, out, _ = drl(
        "--without", "drl-reward-jpeg", "--without", "drl_reward_ocr", "plugins", "list"
    )
    assert code == 0
    assert "reward\t" not in out
    code, _, err = drl("--without", "numpy", "plugins", "list")
    assert code == 2
    assert err.startswith(
        "--without numpy: no distribution of that name has a plugin\n  installed:"
    )


def test_a_component_that_was_switched_off_says_so_where_it_is_needed(drl: Drl) -> None:
    code, _, err = drl("--without", "drl-reward-ocr", "config", "check", QUICKSTART)
    assert code == 2
    assert "reward.type" in err
    assert "drl-reward-ocr has it, but is switched off (--without or DRL_PLUGINS_OFF)" in err


def test_plugins_are_loaded_once_and_only_when_they_are_asked_for() -> None:
    session = Session(without=("drl-reward-ocr",))
    assert session.loaded is None
    assert session.catalog is session.catalog
    assert "ocr" not in session.catalog.names("reward")


def test_a_report_is_written_where_the_run_is_and_named(drl: Drl, tmp_path: Path) -> None:
    code, _, err = drl("report", str(tmp_path))
    assert code == 2
    assert "is not a run directory" in err
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_a_line_and_a_module_of_its_own(drl: Drl) -> None:
    assert len({path for path, _ in COMMANDS.values()}) == len(COMMANDS)
    for name, (_, summary) in COMMANDS.items():
        assert summary.endswith("."), name
        code, out, _ = drl(name, "-h")
        assert code == 0
        assert out.startswith(f"Usage: drl {name} ")


def test_the_table_of_a_narrow_terminal_wraps_and_marks_nothing_up(
    install: Install, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        """Standard output of this test, as a terminal."""

        def __init__(self) -> None:
            self.real = sys.stdout

        def isatty(self) -> bool:
            return True

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    install("acme-broken", "raise RuntimeError('[red]not markup[/red]')")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout", Terminal())
    code = execute(["plugins", "list", "--kind", "reward"])
    out = capfd.readouterr().out
    assert code == 0
    assert "drl-reward-ocr" in out
    assert "RuntimeError: [red]not markup[/red]" in out
    assert "see the whole traceback:  drl plugins doctor" in out


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drl_cli", "--version"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("drl, version ")


def test_commands_of_plugins_stand_below_in_order_with_a_short_line(
    drl: Drl, install: Install
) -> None:
    command = (
        "import click\nfrom drl.api import hookimpl\nDRL_API = (1, 0)\n"
        "@click.command(name='{0}')\ndef it():\n    {1!r}\n    raise SystemExit(3)\n"
        "@hookimpl\ndef drl_add_commands(cli):\n    cli.add_command(it)\n"
    )
    install("acme-zebra", command.format("zebra", "Stripes."))
    install("acme-ant", command.format("ant", "Carries " + "very " * 20 + "much."))
    out = drl("--help")[1]
    names = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line.strip()]
    assert names == [*COMMANDS, "ant", "zebra"]
    (ant,) = [line for line in out.splitlines() if line.startswith("  ant ")]
    assert ant.endswith("...")
    assert len(ant.split(maxsplit=1)[1]) <= 60


def test_a_plugin_may_name_its_command_otherwise_than_its_function(
    drl: Drl, install: Install
) -> None:
    install(
        "acme-other",
        "import click\nfrom drl.api import hookimpl\nDRL_API = (1, 0)\n"
        "@click.command(name='plain')\ndef it():\n    'Say it.'\n    click.echo('said')\n    return 4\n"
        "@hookimpl\ndef drl_add_commands(cli):\n    cli.add_command(it, 'fancy')\n",
    )
    assert drl("fancy") == (4, "said\n", "")
    assert drl("plain")[0] == 2


def test_a_reader_that_leaves_early_ends_the_command_with_1() -> None:
    program = (
        "import sys\nfrom drl_cli.main import execute\n"
        "class Gone:\n"
        "    def __getattr__(self, name): return getattr(sys.__stdout__, name)\n"
        "    def write(self, text): raise BrokenPipeError\n"
        "sys.stdout = Gone()\n"
        "code = execute(['plugins', 'list'])\n"
        "print(code, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.stderr == "1\n"
