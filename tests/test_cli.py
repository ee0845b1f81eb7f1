"""The command as a whole: what it prints, what it returns, what it does not import."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drl_cli.main import COMMANDS, run

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")

Drl = Callable[..., tuple[int, str, str]]
Install = Callable[[str, str], None]

COMMAND_PLUGIN = """
import click
from drl.api import Component, hookimpl
from drl import errors

DRL_API = (1, 0)

@click.command()
@click.argument('what')
@click.pass_obj
def acme(session, what):
    'Fail as asked.'
    session.catalog
    raise {
        'input': errors.BadInput('that is no recipe'),
        'run': errors.SyncError('weights did not arrive'),
        'stopped': errors.Interrupted('saved; go on with --resume'),
        'interrupt': KeyboardInterrupt(),
        'bug': ZeroDivisionError('boom'),
        'driver': errors.EngineError('no driver'),
    }[what]

@hookimpl
def drl_add_commands(cli):
    cli.add_command(acme)

@hookimpl
def drl_explain_error(error):
    return 'install the driver first' if 'driver' in str(error) else None
"""


def test_help_lists_every_command_with_its_line(drl: Drl) -> None:
    code, out, _ = drl("--help")
    assert code == 0
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name} " in out
        assert summary in out


def test_listing_and_help_import_nothing_heavy() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'pydantic', 'numpy', 'rapidfuzz']))\n"
        "from drl_cli.main import execute\n"
        "assert execute(['--help']) == execute(['plugins', 'list']) == 0\n"
        "assert 'rich.console' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "reward\tocr\tdrl-reward-ocr" in done.stdout


def test_config_check_imports_no_torch() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'diffusers', 'transformers']))\n"
        "from drl_cli.main import execute\n"
        f"sys.exit(execute(['config', 'check', {QUICKSTART!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [*COMMANDS, "plugins list", "plugins show", "plugins doctor"])
def test_every_command_teaches_by_example(drl: Drl, command: str) -> None:
    code, out, _ = drl(*command.split(), "--help")
    assert code == 0
    assert "Example" in out or "Commands:" in out


@pytest.mark.parametrize("command", ["check", "show", "explain"])
def test_every_config_command_teaches_by_example(drl: Drl, command: str) -> None:
    code, out, _ = drl("config", command, "--help")
    assert code == 0
    assert f"drl config {command} " in out


def test_help_has_a_short_form_and_there_is_a_version(drl: Drl) -> None:
    assert drl("-h")[:2] == drl("--help")[:2]
    assert drl("--version")[1].startswith("drl, version 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["run"],
        ["run", "absent.toml"],
        ["plugins", "show", "reward"],
        ["plugins", "show", "colour", "x"],
        ["plugins", "list", "--colour"],
        ["config", "show", QUICKSTART, "--origin", "--toml"],
        ["report", "absent"],
        ["--without"],
        [],
    ],
)
def test_a_wrong_command_line_is_bad_input(drl: Drl, arguments: list[str]) -> None:
    code, _, err = drl(*arguments)
    assert code == 2
    assert "Traceback" not in err
    assert err.startswith("Usage:") or "Error" in err


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("input", 2, "that is no recipe\n"),
        ("run", 1, "weights did not arrive\n"),
        ("stopped", 130, "saved; go on with --resume\n"),
        ("interrupt", 130, "\ninterrupted\n"),
        ("driver", 1, "no driver\n  install the driver first\n"),
        (
            "bug",
            1,
            "internal error: ZeroDivisionError: boom\n"
            "  for the traceback run it again as:  drl --debug …\n",
        ),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    drl: Drl, install: Install, what: str, code: int, said: str
) -> None:
    install("acme-command", COMMAND_PLUGIN)
    assert drl("acme", what) == (code, "", said)


@pytest.mark.parametrize("what", ["input", "bug"])
def test_debug_shows_the_traceback(drl: Drl, install: Install, what: str) -> None:
    install("acme-command", COMMAND_PLUGIN)
    _, _, err = drl("--debug", "acme", what)
    assert "Traceback (most recent call last)" in err
    assert "--debug" not in err


def test_a_plugin_adds_commands_to_help(drl: Drl, install: Install) -> None:
    install("acme-command", COMMAND_PLUGIN)
    assert re.search(r"^  acme +Fail as asked\.$", drl("--help")[1], re.MULTILINE)
    assert "acme" not in drl("--without", "acme-command", "--help")[1]
    code, _, err = drl("--without", "acme-command", "acme", "bug")
    assert code == 2
    assert "No such command 'acme'" in err


@pytest.mark.parametrize("taken", ["run", "acme"])
def test_a_command_that_exists_is_refused_with_its_plugin(
    drl: Drl, install: Install, taken: str
) -> None:
    install("acme-command", COMMAND_PLUGIN)
    install(
        "acme-other",
        COMMAND_PLUGIN.replace("cli.add_command(acme)", f"cli.add_command(acme, {taken!r})"),
    )
    code, _, err = drl("acme", "bug")
    assert code == 1
    assert f"a plugin adds the command 'drl {taken}', which exists already" in err
    assert "raised by acme-" in err
    assert drl("plugins", "list")[0] == 0


def test_an_error_in_a_hook_names_its_plugin(drl: Drl, install: Install) -> None:
    source = COMMAND_PLUGIN.replace("cli.add_command(acme)", "raise OSError('offline')")
    install("acme-command", source)
    code, _, err = drl("acme")
    assert code == 1
    assert "internal error: OSError: offline" in err
    assert "raised by acme-command 1.0 in its hook drl_add_commands" in err


def test_a_hint_that_fails_does_not_hide_the_error(drl: Drl, install: Install) -> None:
    install("acme-command", COMMAND_PLUGIN.replace("return 'install", "return 1 / 0 or 'install"))
    code, _, err = drl("acme", "driver")
    assert code == 1
    assert err == (
        "no driver\n  no hint: ZeroDivisionError('division by zero'); "
        "raised by acme-command 1.0 in its hook drl_explain_error\n"
    )


def test_old_objects_are_gone_through_rarely_and_young_ones_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["drl", "--version"])
    try:
        with pytest.raises(SystemExit) as ended:
            run()
        assert ended.value.code == 0
        assert gc.get_threshold() == (*before[:2], 100)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_an_error_that_a_library_makes_of_an_interrupt_is_an_interrupt(
    drl: Drl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*arguments: object, **options: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            raise OSError("weights.safetensors cannot be read") from None

    # a shell starts what runs in its background with the signal ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("drl_cli.main.cli.main", reading)
            assert drl("plugins", "list") == (130, "", "interrupted\n")
            patched.setattr(
                "drl_cli.main.cli.main", lambda *_, **__: (_ for _ in ()).throw(OSError("no"))
            )
            assert drl("plugins", "list")[0] == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
