"""The command: what it prints, what it returns, what it does not import."""

from __future__ import annotations

import importlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drl.testing.distributions import MINIMAL_PLUGIN, write_distribution
from drl_cli.main import COMMANDS, execute

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")

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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for distributions that this process finds; what it imports is forgotten later."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for module in set(sys.modules) - before:
        if module.startswith("acme"):
            del sys.modules[module]


@pytest.fixture
def install(site: Path) -> Callable[[str, str], None]:
    """Install a plugin of one module."""

    def write(name: str, source: str) -> None:
        package = name.replace("-", "_")
        write_distribution(site, name, {f"{package}.py": source}, entry_point=package)
        importlib.invalidate_caches()

    return write


@pytest.fixture
def drl(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run one command line in this process; gives exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = execute(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call


Drl = Callable[..., tuple[int, str, str]]
Install = Callable[[str, str], None]


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
    assert "  acme     Fail as asked." in drl("--help")[1]
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


def test_the_list_as_json(drl: Drl, install: Install) -> None:
    install("acme-broken", "import nowhere_at_all")
    code, out, _ = drl("plugins", "list", "--json")
    listed = json.loads(out)
    assert code == 0
    assert {"kind", "name", "distribution", "version", "summary", "target"} == set(
        listed["components"][0]
    )
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


def test_doctor_of_a_stranger_is_bad_input(drl: Drl) -> None:
    code, _, err = drl("plugins", "doctor", "numpy")
    assert code == 2
    assert err.startswith("'numpy' has no plugin installed\n  installed: drl-core, ")


def test_a_recipe_that_is_valid_says_so(drl: Drl) -> None:
    assert drl("config", "check", QUICKSTART) == (0, f"{QUICKSTART} is valid\n", "")


def test_set_is_checked_like_the_file(drl: Drl) -> None:
    code, _, err = drl("config", "check", QUICKSTART, "--set", "rollout.batch_siez=4")
    assert code == 2
    assert "rollout.batch_siez" in err
    assert "batch_size" in err


def test_show_gives_every_option_and_its_origin(drl: Drl) -> None:
    code, out, _ = drl(
        "config", "show", QUICKSTART, "--origin", "--set", "train.seed=7", "--set", "run.name=x"
    )
    lines = out.splitlines()
    assert code == 0
    assert "train.seed = 7\t--set" in lines
    assert 'run.name = "x"\t--set' in lines
    assert any(line.endswith("\tdefault") for line in lines)


def test_show_as_toml_is_a_recipe(drl: Drl, tmp_path: Path) -> None:
    complete = tmp_path / "complete.toml"
    complete.write_text(drl("config", "show", QUICKSTART, "--toml")[1])
    assert drl("config", "check", str(complete))[0] == 0
    assert drl("config", "show", str(complete))[1] == drl("config", "show", QUICKSTART)[1]


def test_explain_an_option_and_a_section(drl: Drl) -> None:
    code, out, _ = drl("config", "explain", "algorithm.policy_loss.clip_range")
    assert code == 0
    assert "drl-loss-flow-grpo" in out
    assert "ocr" in drl("config", "explain", "reward")[1]
    assert drl("config", "explain", "rollout.batch_siez")[0] == 2


def test_plan_prints_the_arithmetic(drl: Drl) -> None:
    code, out, _ = drl(
        "plan",
        QUICKSTART,
        "--set",
        "rollout.batch_size=4",
        "--set",
        "rollout.n_samples_per_prompt=8",
    )
    assert code == 0
    assert "4 prompts x 8 samples = 32 samples" in out


def test_a_dry_run_writes_nothing(
    drl: Drl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = drl("run", QUICKSTART, "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert code == 0
    assert "samples" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "site"] or list(tmp_path.iterdir()) == []


def test_a_run_of_a_bad_recipe_names_all_problems(drl: Drl, tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text(TEN_MISTAKES)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a sign"}\n')
    for command in (["config", "check"], ["run"], ["plan"]):
        code, out, err = drl(*command, str(recipe))
        assert (code, out) == (2, "")
        assert "bad.toml has 10 problems" in err
        for path in MISTAKEN:
            assert path in err, path


TEN_MISTAKES = """
[run]
name = ""
[model]
family = "sd33"
checkpoint = "acme/sd3"
[lora]
rank = 0
[rollout]
engine = "locall"
batch_size = "many"
n_sample_per_prompt = 4
[data]
source = "jsonl"
prompt_data = "prompts.jsonl"
[train]
num_rollout = 2
[sampling]
num_steps = 4
[sde]
type = "cps"
noise_level = -1
num_steps = 2
step_strategy = "sde_window"
[reward]
type = "oct"
[algorithm]
loss = "policy_loss"
[algorithm.policy_loss]
clip_range = -0.1
[surprise]
x = 1
"""

MISTAKEN = [
    "run.name",
    "model.family",
    "lora.rank",
    "rollout.engine",
    "rollout.batch_size",
    "rollout.n_sample_per_prompt",
    "sde.noise_level",
    "reward.type",
    "algorithm.policy_loss.clip_range",
    "surprise",
]
