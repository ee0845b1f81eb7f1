"""The option table of docs/recipes.md, made from the models; ``python -m drl.config.table`` prints it."""

from __future__ import annotations

from drl.config.describe import Described, described
from drl.config.sections import SECTIONS


def option_table() -> str:
    """Return a Markdown table of core's options per section."""
    return "\n\n".join(_section(name) for name in SECTIONS)


def _section(name: str) -> str:
    model = SECTIONS[name]
    rows = [_row(option) for option in described(model)]
    head = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    return "\n".join([f"**`[{name}]`** {model.__doc__}", "", *head, *rows])


def _row(option: Described) -> str:
    kind = f"{option.kind}, {option.limits}" if option.limits else option.kind
    default = option.default if option.default in {"required", "unset"} else f"`{option.default}`"
    cells = [f"`{option.key}`", kind, default, option.help]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(option_table())
