"""Dotted paths in recipes, ``package.module:name``: read from source to check, imported to run.

Reading imports nothing. The file is found below the place of the top package, because asking Python for
a dotted module would import the packages above it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, cast

from drl.errors import BadInput, UnknownComponent

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_dotted(name: str) -> bool:
    """True when a recipe gives an import path instead of the name of a registered component."""
    return _PATH.fullmatch(name) is not None


def table_name(name: str) -> str:
    """Return what a reward that is the only one is called: its name, of a path the class in lower_snake."""
    if not is_dotted(name):
        return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.partition(":")[2])
    return words.lower().strip("_") or "reward"


@dataclass(frozen=True, slots=True)
class Definition:
    """What a module's source says of a name: a function, a class, another value, or nothing clear.

    ``kind``: "function", "class", "value" or "unclear"; ``why`` says what makes it unclear.
    """

    kind: str
    node: ast.AST | None = None
    why: str = ""

    @property
    def function(self) -> Function | None:
        """The statement of a function whose signature is what it says."""
        clear = self.kind == "function" and isinstance(self.node, FUNCTION_NODES)
        return cast("Function", self.node) if clear else None


def read_definition(path: str) -> Definition:
    """Return what the source says of ``module:name``; UnknownComponent when it is not there."""
    module, _, name = path.partition(":")
    file = source_file(module)
    if file is None:
        return Definition("unclear", why=f"{module} has no source file")
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise UnknownComponent(f"{path}: {file.name} cannot be read: {error}") from error
    bound = list(_bindings(tree.body))
    found = [node for known, node in bound if known == name]
    if len(found) > 1:
        return Definition("unclear", why=f"{module} defines {name} more than once")
    if found:
        return _classified(found[0], module)
    names = {known for known, _ in bound}
    if names & {"*", "__getattr__"}:
        return Definition("unclear", why=f"{module} does not define {name} itself")
    defined = sorted({n for n, node in bound if isinstance(node, (*FUNCTION_NODES, ast.ClassDef))})
    near = _near(name, defined) or f"; it defines {', '.join(defined) or 'nothing'}"
    raise UnknownComponent(f"{module} has no {name}{near}")


def source_file(module: str) -> Path | None:
    """Return the file of a module, None when it has no Python source; UnknownComponent without one."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UnknownComponent(
            f"there is no module {top!r}: install it, or put its folder on PYTHONPATH "
            "(the folder of a recipe is not searched)"
        )
    so_far = top
    for part in rest:
        folders = list(spec.submodule_search_locations or ())
        inner = PathFinder.find_spec(part, folders) if folders else None
        if inner is None:
            siblings = [found.name for found in pkgutil.iter_modules(folders)]
            raise UnknownComponent(f"{so_far} has no module {part!r}{_near(part, siblings)}")
        spec, so_far = inner, f"{so_far}.{part}"
    return _file_of(spec)


def _file_of(spec: ModuleSpec) -> Path | None:
    if spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        return None
    return Path(spec.origin)


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _bindings(body: Sequence[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield what the statements of a module bind, also inside ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, (*FUNCTION_NODES, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0], node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for inner in (inner for target in targets for inner in ast.walk(target)):
                if isinstance(inner, ast.Name):
                    yield inner.id, node
        else:
            for name, value in ast.iter_fields(node):
                if name in _BLOCKS:
                    yield from _bindings(value)


def _classified(node: ast.AST, module: str) -> Definition:
    if isinstance(node, FUNCTION_NODES):
        if node.decorator_list:
            return Definition("unclear", node, f"{module} decorates {node.name}")
        return Definition("function", node)
    if isinstance(node, ast.ClassDef):
        return Definition("class", node)
    if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
        if isinstance(node.value, (ast.Constant, ast.Tuple, ast.List)):
            return Definition("value", node)
        return Definition("unclear", node, f"{module} computes it")
    what = "imports" if isinstance(node, (ast.Import, ast.ImportFrom)) else "computes"
    return Definition("unclear", node, f"{module} {what} it")


def facts_of(definition: Definition) -> dict[str, Any]:
    """Return the class attributes with plain values, as a registered component states its ``facts``.

    ``needs`` reads ``frozenset({Need.ROLLOUT, …})`` and becomes the tuple of the needs' values.
    """
    if not isinstance(definition.node, ast.ClassDef):
        return {}
    facts = {}
    for node in definition.node.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        plain = _plain(value)
        if isinstance(target, ast.Name) and plain is not None:
            facts[target.id] = plain
    facts.pop("step_share", None)  # names an option, and a class named by its path has none
    return facts


def _plain(value: ast.AST) -> Any:
    """Return a literal, or the values of a set of needs; None for what must be computed."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.keywords:
        if value.func.id != "frozenset" or len(value.args) > 1:
            return None
        return _plain(value.args[0]) if value.args else ()
    if isinstance(value, (ast.Set, ast.Tuple, ast.List)):
        members = tuple(_plain(member) for member in value.elts)
        return None if None in members else members
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        from drl.types import Need

        known = Need.__members__.get(value.attr) if value.value.id == "Need" else None
        return None if known is None else known.value
    return value.value if isinstance(value, ast.Constant) else None


def imported(path: str) -> Any:
    """Import ``module:name``; BadInput says what its module raised, and where."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    # Foreign code, like a plugin: whatever it raises, the option that names it must be told.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        reason = f"{type(error).__name__}: {error}{place}"
        raise BadInput(f"{path} cannot be imported: {reason}") from error
    if name not in vars(module):
        module_getattr = vars(module).get("__getattr__")
        if module_getattr is None:
            raise UnknownComponent(f"{module_name} has no {name}{_near(name, list(vars(module)))}")
        return module_getattr(name)
    return vars(module)[name]


def _near(name: str, known: Sequence[str]) -> str:
    from rapidfuzz import fuzz, process

    found = process.extractOne(name, known, scorer=fuzz.ratio, score_cutoff=60)
    return f"; did you mean '{found[0]}'?" if found else ""
