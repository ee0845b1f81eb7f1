"""Plugins as distributions: installed, broken, removed, made by the tool, and built as wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest

from bump_version import manifests
from drl.testing.distributions import MINIMAL_PLUGIN, write_distribution
from new_plugin import main as new_plugin

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"


def run(
    *command: str | Path, path: tuple[Path, ...] = (), python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run a module or script of a Python with these folders on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [str(python), *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def drl(*arguments: str | Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return run("-m", "drl_cli", *arguments, path=path)


def test_three_broken_plugins_change_nothing_but_lines_in_the_list(tmp_path: Path) -> None:
    missing = "import a_package_that_is_not_there\n" + MINIMAL_PLUGIN
    foreign = MINIMAL_PLUGIN.replace("(1, 0)", "(9, 0)")
    misspelt = MINIMAL_PLUGIN.replace("drl_register_rewards", "drl_registr_rewards")
    for name, source in (("missing", missing), ("foreign", foreign), ("misspelt", misspelt)):
        module = f"acme_{name}"
        write_distribution(tmp_path, f"acme-{name}", {f"{module}.py": source}, entry_point=module)
    before, after = drl("plugins", "list"), drl("plugins", "list", path=(tmp_path,))
    assert after.returncode == 0
    assert after.stderr == ""
    added = after.stdout.removeprefix(before.stdout).splitlines()
    assert [line.split("\t")[:4] for line in added] == [
        ["failed", f"acme-{name}", f"acme-{name}", "1.0"]
        for name in ("foreign", "missing", "misspelt")
    ]
    assert "is for plugin interface 9.0, this drl has 1.0" in added[0]
    assert "did you mean 'drl_register_rewards'?" in added[2]
    assert "No module named 'a_package_that_is_not_there'" in added[1]
    check = drl("config", "check", QUICKSTART, path=(tmp_path,))
    assert (check.returncode, check.stderr) == (0, "")


def without_distribution(name: str, folder: Path) -> tuple[Path, ...]:
    """Return a path on which everything of this environment is found but one distribution."""
    site = Path(str(distribution("pluggy").locate_file("")))
    removed = name.replace("-", "_")
    for entry in site.iterdir():
        if removed not in entry.name:
            (folder / entry.name).symlink_to(entry)
    members = [manifest.parent / "src" for manifest in manifests(ROOT)[1:]]
    return (folder, *(source for source in members if not (source / removed).is_dir()))


def test_an_uninstalled_plugin_vanishes_and_its_recipe_says_what_to_install(tmp_path: Path) -> None:
    path = without_distribution("drl-reward-ocr", tmp_path)

    def bare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run("-S", "-m", "drl_cli", *arguments, path=path)  # -S: no site-packages, no .pth

    whole = drl("plugins", "list").stdout.splitlines()
    listed = bare("plugins", "list")
    assert listed.stdout.splitlines() == [line for line in whole if "drl-reward-ocr" not in line]
    assert len(listed.stdout.splitlines()) == len(whole) - 1
    for command in (["config", "check"], ["run"]):
        done = bare(*command, QUICKSTART)
        assert done.returncode == 2
        assert (
            "reward.type  no reward named 'ocr' is installed   (line "
            in done.stderr.splitlines()[1]
        )
        assert "it ships in its own package:  pip install drl-reward-ocr" in done.stderr
        assert "installed: jpeg" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_switched_off_plugin_is_as_good_as_gone() -> None:
    listed = drl("--without", "drl-reward-ocr", "plugins", "list")
    assert "drl-reward-ocr" not in listed.stdout
    done = drl("--without", "drl-reward-ocr", "config", "check", QUICKSTART)
    assert done.returncode == 2
    assert "no reward named 'ocr' is installed" in done.stderr
    assert "drl-reward-ocr has it, but is switched off" in done.stderr


def made(kind: str, name: str, folder: Path, site: Path) -> tuple[Path, Path]:
    """Write a plugin with the tool and install its metadata as pip would; gives folder and source."""
    target = folder / name
    assert new_plugin([kind, name, str(target)]) == 0
    label = f"drl-{kind}-{name.replace('_', '-')}"
    write_distribution(site, label, {}, version="0.1.0")
    return target, target / "src"


def test_plugins_made_by_the_tool_pass_their_contracts_and_are_listed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    reward, reward_source = made("reward", "glow_worm", tmp_path, site)
    loss, loss_source = made("loss", "smooth", tmp_path, site)
    function, function_source = made("function", "wide_enough", tmp_path, site)
    path = (site, reward_source, loss_source, function_source)
    listed = json.loads(drl("plugins", "list", "--json", path=path).stdout)
    names = {(item["kind"], item["name"], item["distribution"]) for item in listed["components"]}
    assert ("reward", "glow_worm", "drl-reward-glow-worm") in names
    assert ("loss", "smooth", "drl-loss-smooth") in names
    assert ("function", "wide_enough", "drl-function-wide-enough") in names
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    tested = run("-m", "pytest", *options, reward, loss, function, path=path)
    assert tested.returncode == 0, tested.stdout
    picked = ("reward.type=glow_worm", "rollout.dynamic_sampling_filter=wide_enough")
    sets = [word for setting in picked for word in ("--set", setting)]
    usable = drl("config", "check", QUICKSTART, *sets, path=path)
    assert (usable.returncode, usable.stderr) == (0, "")


def fresh_environment(folder: Path) -> Path:
    """Make a venv that sees the third-party packages of this one, and nothing of drl; gives its Python.

    They are linked, not downloaded; pip still finds them, so that it checks every requirement.
    """
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip(python, "uninstall", "-y", "setuptools")  # an old one would hide the newer one linked below
    ours = {item.name.replace("-", "_") for item in distributions() if item.name.startswith("drl-")}
    site = Path(str(distribution("pluggy").locate_file("")))
    links = folder / "third_party"
    links.mkdir()
    for entry in site.iterdir():
        if not any(name in entry.name for name in (*ours, "drl_core", "drl_cli")):
            (links / entry.name).symlink_to(entry)
    purelib = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", python=python)
    (Path(purelib.stdout.strip()) / "third_party.pth").write_text(f"{links}\n")
    return python


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip; the test fails with its output."""
    done = run("-m", "pip", *arguments, "--disable-pip-version-check", "-q", python=python)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of all members."""
    folder = tmp_path_factory.mktemp("wheels")
    members = [manifest.parent for manifest in manifests(ROOT)[1:]]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    pip(Path(sys.executable), "wheel", *options, *members)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """The Python of a fresh environment with the wheels of all members."""
    python = fresh_environment(tmp_path_factory.mktemp("environment"))
    pip(python, "install", "--no-index", *sorted(wheels.glob("*.whl")))
    return python


@pytest.mark.slow
def test_wheels_offer_the_same_plugins_outside_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    listed = subprocess.run(
        [installed.with_name("drl"), "plugins", "list"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout == drl("plugins", "list").stdout
    where = run(
        "-c", "import drl, drl_cli; print(drl.__file__, drl_cli.__file__)", python=installed
    )
    assert str(ROOT) not in where.stdout


@pytest.mark.slow
def test_the_quickstart_is_sound_with_wheels_alone(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed.with_name("drl"), "run", str(QUICKSTART), "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == drl("run", QUICKSTART, "--dry-run").stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reward", "loss", "function"])
def test_a_package_made_by_the_tool_installs_with_pip(
    installed: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "mine"
    assert new_plugin([kind, f"my_{kind}", str(folder)]) == 0
    pip(installed, "install", "--no-index", "--no-build-isolation", folder)
    shown = run("-m", "drl_cli", "plugins", "show", kind, f"my_{kind}", python=installed)
    assert f"drl-{kind}-my-{kind} 0.1.0" in shown.stdout
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    tested = run("-m", "pytest", *options, folder / "tests", python=installed)
    assert tested.returncode == 0, tested.stdout
    pip(installed, "uninstall", "-y", f"drl-{kind}-my-{kind}")
    gone = run("-m", "drl_cli", "plugins", "show", kind, f"my_{kind}", python=installed)
    assert gone.returncode == 2


@pytest.mark.slow
def test_uninstalling_a_wheel_makes_its_component_vanish(installed: Path, wheels: Path) -> None:
    try:
        pip(installed, "uninstall", "-y", "drl-reward-ocr")
        listed = run("-m", "drl_cli", "plugins", "list", python=installed)
        assert "drl-reward-ocr" not in listed.stdout
        checked = run("-m", "drl_cli", "config", "check", QUICKSTART, python=installed)
        assert checked.returncode == 2
        assert "it ships in its own package:  pip install drl-reward-ocr" in checked.stderr
    finally:
        pip(installed, "install", "--no-index", *wheels.glob("drl_reward_ocr-*.whl"))
