#!/usr/bin/env python3
"""List the public names of drl with their signatures; with ``--write``, store the listing.

The listing is ``tests/public_api.txt``. A test compares it with the code, so that a change of the
interface is a line in a diff.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from signatures import signature_of

PUBLIC = ("drl.api", "drl.errors", "drl.options", "drl.lora", "drl.mathematics", "drl.testing")
LISTING = Path(__file__).resolve().parents[1] / "tests" / "public_api.txt"


def listing() -> str:
    """Return all public names, one a line, members of classes indented."""
    lines: list[str] = []
    for root in PUBLIC:
        for module in modules_of(root):
            names = list(names_of(module))
            if names:
                lines += ["", f"[{module.__name__}]"]
                for name in names:
                    lines += described(name, vars(module)[name])
    return "\n".join(lines[1:]) + "\n"


def modules_of(name: str) -> Iterator[types.ModuleType]:
    """Yield a module and, of a package, its public submodules; those of drl.lora are private."""
    module = importlib.import_module(name)
    yield module
    if name != "drl.lora" and "__path__" in vars(module):
        for found in pkgutil.iter_modules(module.__path__):
            if not found.name.startswith("_"):
                yield from modules_of(f"{name}.{found.name}")


def names_of(module: types.ModuleType) -> Iterator[str]:
    """Yield the names in ``__all__``, or else the public ones that the module itself defines."""
    stated = vars(module).get("__all__")
    if stated is not None:
        yield from sorted(stated)
        return
    for name, value in sorted(vars(module).items()):
        defined = inspect.isclass(value) or inspect.isfunction(value)
        if defined and not name.startswith("_") and value.__module__ == module.__name__:
            yield name


def described(name: str, value: object) -> list[str]:
    """Return the lines of one name."""
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        return [f"class {name}({bases})", *(f"    {line}" for line in members_of(value))]
    if inspect.isfunction(value):
        foreign = value.__module__.partition(".")[0] != "drl"
        return [f"{name}, of {value.__module__}" if foreign else f"{name}{signature_of(value)}"]
    return [f"{name}: {type(value).__name__}"]


def members_of(owner: type) -> Iterator[str]:
    """Yield fields and public methods that a class itself defines, in the order of the source."""
    if issubclass(owner, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in owner)
        return
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    for field in fields:
        yield f"{field.name}: {field.type}{default_of(field)}"
    for name, member in vars(owner).items():
        if name.startswith("_") and name != "__init__":
            continue
        if name == "__init__" and fields:
            continue
        if isinstance(member, property) and member.fget is not None:
            yield f"property {name} -> {inspect.signature(member.fget).return_annotation}"
        elif inspect.isfunction(member):
            abstract = "abstract " if name in owner.__dict__.get("__abstractmethods__", ()) else ""
            yield f"{abstract}{name}{signature_of(member)}"
        elif type(member).__name__ == "FixtureFunctionDefinition":
            yield f"fixture {name}"


def default_of(field: dataclasses.Field[object]) -> str:
    """Return " = default" of a dataclass field, nothing when it must be given."""
    if field.default is not dataclasses.MISSING:
        default = field.default
        shown = default.value if isinstance(default, enum.Enum) else default
        return f" = {shown!r}"
    if field.default_factory is not dataclasses.MISSING:
        return " = a fresh one"
    return ""


def main(arguments: list[str]) -> int:
    """Print or store the listing; return the exit code."""
    if arguments not in ([], ["--write"]):
        print("usage: public_api.py [--write]", file=sys.stderr)
        return 2
    if arguments:
        LISTING.write_text(listing(), "utf-8")
    else:
        print(listing(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
