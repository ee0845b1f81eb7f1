#!/usr/bin/env python3
"""Hold the tree to its limits; prints the offending places and exits 1 when there is any.

Code and tests alike: no function over 80 lines except one named ``train``, no file of 400 lines or
more. Code alone: every argument and result annotated, nine functions of ten under 40 lines. Over the
tree: at least as many lines of tests as of code, blank lines left out. A file is a test when it lies
in a ``tests`` folder or its name starts with ``test_``; the contracts of ``drl.testing`` are code,
which ships.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).resolve().parents[1]

LONGEST_FUNCTION = 80
FUNCTION_P90 = 40
LONGEST_FILE = 400
TEST_RATIO = 1.0
EXEMPT = "train"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its lines that are not blank, its functions."""

    path: Path
    lines: int
    length: int
    functions: tuple[Function, ...]

    @property
    def is_test(self) -> bool:
        """True for files that pytest collects, and for those that help them."""
        return "tests" in self.path.parts or self.path.name.startswith("test_")


def main() -> int:
    """Check the files that git tracks, or would track; return the exit code."""
    sources = [read(ROOT, path) for path in python_files(ROOT)]
    offences = [line for check in CHECKS for line in check(sources)]
    print(summary(sources))
    for line in offences:
        print(line, file=sys.stderr)
    return 1 if offences else 0


def python_files(root: Path) -> list[Path]:
    """Return the paths, relative to the root, of all Python files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return sorted({Path(name) for name in listed.stdout.splitlines() if (root / name).is_file()})


def read(root: Path, path: Path) -> Source:
    """Parse one file."""
    text = (root / path).read_text("utf-8")
    lines = text.splitlines()
    tree = ast.parse(text, filename=str(path))
    functions = tuple(node for node in ast.walk(tree) if isinstance(node, Function))
    return Source(path, sum(1 for line in lines if line.strip()), len(lines), functions)


def lines_of(function: Function) -> int:
    """Return the lines from ``def`` to the end, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_functions(sources: Sequence[Source]) -> Iterator[str]:
    """Name every function that is too long."""
    for source in sources:
        for function in source.functions:
            if lines_of(function) > LONGEST_FUNCTION and function.name != EXEMPT:
                yield (
                    f"{source.path}:{function.lineno}: {function.name} has {lines_of(function)} lines; "
                    f"at most {LONGEST_FUNCTION}"
                )


def long_files(sources: Sequence[Source]) -> Iterator[str]:
    """Name every file that is two files."""
    for source in sources:
        if source.length >= LONGEST_FILE:
            yield f"{source.path}: {source.length} lines; fewer than {LONGEST_FILE}"


def untyped(sources: Sequence[Source]) -> Iterator[str]:
    """Name every function of the code with an argument or a result without annotation."""
    for source in (one for one in sources if not one.is_test):
        for function in source.functions:
            missing = [a.arg for a in arguments_of(function) if a.annotation is None]
            if function.returns is None:
                missing.append("the result")
            if missing:
                yield (
                    f"{source.path}:{function.lineno}: {function.name} leaves {', '.join(missing)} "
                    "without a type"
                )


def arguments_of(function: Function) -> list[ast.arg]:
    """Return every argument but ``self`` and ``cls``."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    stars = [star for star in (given.vararg, given.kwarg) if star]
    return [argument for argument in (*named, *stars) if argument.arg not in ("self", "cls")]


def function_tail(sources: Sequence[Source]) -> Iterator[str]:
    """Complain when one function of ten is long."""
    p90 = function_p90(sources)
    if p90 >= FUNCTION_P90:
        yield f"nine of ten functions should be under {FUNCTION_P90} lines; the 90th percentile is {p90:.0f}"


def test_share(sources: Sequence[Source]) -> Iterator[str]:
    """Complain when there are fewer lines of tests than of code."""
    code, tests = line_counts(sources)
    if tests < TEST_RATIO * code:
        yield f"{tests} lines of tests for {code} of code; at least {TEST_RATIO:g} a line"


def function_p90(sources: Sequence[Source]) -> float:
    """Return the 90th percentile of function lengths in the code."""
    lengths = [lines_of(f) for source in sources if not source.is_test for f in source.functions]
    return quantiles(lengths, n=10)[-1] if len(lengths) > 1 else float(sum(lengths))


def line_counts(sources: Sequence[Source]) -> tuple[int, int]:
    """Return the lines of code and of tests."""
    tests = sum(source.lines for source in sources if source.is_test)
    return sum(source.lines for source in sources) - tests, tests


def summary(sources: Sequence[Source]) -> str:
    """Return the figures in one line."""
    code, tests = line_counts(sources)
    lengths = [lines_of(f) for source in sources for f in source.functions]
    return (
        f"{len(sources)} files, {code} lines of code, {tests} of tests; functions: "
        f"90th percentile {function_p90(sources):.0f}, longest {max(lengths, default=0)} lines"
    )


CHECKS = (long_functions, long_files, untyped, function_tail, test_share)


if __name__ == "__main__":
    sys.exit(main())
