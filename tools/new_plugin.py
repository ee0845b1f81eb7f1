#!/usr/bin/env python3
"""Write a new plugin: a complete distribution whose contract test is green at once.

    python tools/new_plugin.py reward my_score            # a member, in plugins/rewards/my_score
    python tools/new_plugin.py loss my_loss ~/my-loss     # a package of your own, anywhere else
    python tools/new_plugin.py function my_filter         # one function, for an option such as
                                                          # rollout.dynamic_sampling_filter

A member of this repository pins drl-core exactly and gets its line in requirements/dev.txt and in
known_plugins.toml; a package elsewhere depends on the release series.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from drl import __version__
from drl.api import API_VERSION
from drl.catalog import Catalog, known_plugins
from drl.errors import DrlError
from drl.kinds import BY_NAME, FUNCTION, Kind

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).with_name("_template")

SUMMARIES = {
    "reward": "How near the brightness of the picture is to the one wanted.",
    "loss": "Policy gradient with a quadratic penalty on the ratio instead of a clip.",
    FUNCTION: "Keeps groups whose rewards differ.",
}
CONFIG = 'config="{package}.config:{class_name}Options",'
MORE = {
    "reward": CONFIG,
    "loss": CONFIG
    + '\n            facts={{"needs": ("rollout", "old_log_prob", "transition", "guidance")}},',
    FUNCTION: 'slot="rollout.dynamic_sampling_filter",',
}
"""What else ``plugin.py`` says of the component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be written: a component of a kind, and the folder; ``root`` of the repository."""

    kind: Kind
    name: str
    folder: Path
    root: Path

    @property
    def member(self) -> bool:
        """True when it becomes a member of the repository."""
        return self.folder.parent == self.root / "plugins" / self.kind.plural

    @property
    def distribution(self) -> str:
        """Name for pip."""
        return self.kind.prefix + self.name.replace("_", "-")

    @property
    def package(self) -> str:
        """Name for import."""
        return self.distribution.replace("-", "_")

    @property
    def class_name(self) -> str:
        """The name in capitals, as classes have it."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    def values(self) -> dict[str, str]:
        """What the templates' placeholders stand for."""
        return {
            "kind": self.kind.name,
            "name": self.name,
            "distribution": self.distribution,
            "package": self.package,
            "entry_point": self.distribution.removeprefix("drl-"),
            "class_name": self.class_name,
            "target": self.name if self.kind.name == FUNCTION else self.class_name,
            "hook": self.kind.hook,
            "api_version": str(API_VERSION),
            "summary": SUMMARIES[self.kind.name],
            "more": MORE[self.kind.name].format(package=self.package, class_name=self.class_name),
            "version": __version__ if self.member else "0.1.0",
            "core_requirement": exact() if self.member else series(__version__),
        }


def exact() -> str:
    """Return the pin of a member on this core."""
    return f"drl-core=={__version__}"


def series(version: str) -> str:
    """Return the requirement of a package elsewhere: this minor release series of core."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f"drl-core>={major}.{minor},<{major}.{minor + 1}"


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the plugin that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(SUMMARIES))
    parser.add_argument("name", help="what a recipe writes, in lower_snake")
    parser.add_argument("directory", nargs="?", type=Path, help="an absent or empty folder")
    given = parser.parse_args(arguments)
    kind = BY_NAME[given.kind]
    folder = given.directory or root / "plugins" / kind.plural / given.name
    plan = Plan(kind=kind, name=given.name, folder=folder.resolve(), root=root)
    problem = refusal(plan)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    write(plan)
    if plan.member:
        enrol(plan)
    print(next_steps(plan))
    return 0


def refusal(plan: Plan) -> str | None:
    """Return why the plugin cannot be written, or None."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", plan.name):
        return f"the name {plan.name!r} must be lower_snake, as in 'my_{plan.kind.name}'"
    if plan.folder.exists() and (not plan.folder.is_dir() or any(plan.folder.iterdir())):
        return f"{plan.folder} exists and is not an empty folder; name another one"
    if (plan.kind.name, plan.name) in known_plugins():
        owner = known_plugins()[plan.kind.name, plan.name]
        return f"{plan.kind.name} '{plan.name}' is a component of {owner}; choose another name"
    try:
        entry = Catalog.load().find(plan.kind.name, plan.name)
    except DrlError:
        return None
    return f"{plan.kind.name} '{plan.name}' is a component of {entry.owner}; choose another name"


def write(plan: Plan) -> None:
    """Fill in every template, the common ones and those of the kind."""
    values = plan.values()
    for part in ("common", plan.kind.name):
        for template in sorted((TEMPLATES / part).rglob("*.template")):
            place = template.relative_to(TEMPLATES / part).with_suffix("")
            if place.parts[0] == "src":
                place = Path("src", plan.package, *place.parts[1:])
            target = plan.folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(template.read_text("utf-8")).substitute(values), "utf-8")


def enrol(plan: Plan) -> None:
    """Add a member to the requirements and to the table of known plugins."""
    requirements = plan.root / "requirements" / "dev.txt"
    line = f"-e ./{plan.folder.relative_to(plan.root).as_posix()}"
    lines = requirements.read_text("utf-8").splitlines()
    if line not in lines:
        last = max(number for number, text in enumerate(lines) if text.startswith("-e "))
        lines.insert(last + 1, line)
        requirements.write_text("\n".join(lines) + "\n", "utf-8")
    known = plan.root / "core" / "src" / "drl" / "known_plugins.toml"
    heading = f"[{plan.kind.name}]\n"
    row = f'{plan.name} = "{plan.distribution}"\n'
    text = known.read_text("utf-8")
    if heading not in text:  # the first one of its kind
        text = f"{text.rstrip()}\n\n{heading}"
    known.write_text(text.replace(heading, heading + row, 1), "utf-8")


def next_steps(plan: Plan) -> str:
    """Return what to do now."""
    install = "make setup" if plan.member else f"pip install -e {plan.folder}"
    return (
        f"wrote {plan.distribution} in {plan.folder}\n"
        f"  install it:   {install}\n"
        f"  look at it:   drl plugins show {plan.kind.name} {plan.name}\n"
        f"  test it:      pytest {plan.folder}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
