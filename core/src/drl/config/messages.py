"""Turn pydantic's errors into our messages: what is allowed, what was given, the nearest name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drl.config.flags import RELEASE

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from drl.options import Options

_LONGEST = 60

_FIXED: Mapping[str, str] = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "list": "must be a list",
    "tuple": "must be a list",
    "dict": "must be a table",
    "model": "must be a table",
    "path": "must be a path",
    "finite": "must be a finite number",
}

_LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("must be above {}", "gt"),
    "greater_than_equal": ("must be at least {}", "ge"),
    "less_than": ("must be below {}", "lt"),
    "less_than_equal": ("must be at most {}", "le"),
    "multiple_of": ("must be a multiple of {}", "multiple_of"),
    "string_too_short": ("must have at least {} characters", "min_length"),
    "string_too_long": ("must have at most {} characters", "max_length"),
    "too_short": ("must have at least {} entries", "min_length"),
    "too_long": ("must have at most {} entries", "max_length"),
}


def shown(value: Any) -> str:
    """Return a value as a recipe writes it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(shown(inner) for inner in value[:8])}]"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def limit_text(limit: Any) -> str:
    """Return a limit without a needless ".0"."""
    return str(int(limit)) if isinstance(limit, float) and limit.is_integer() else str(limit)


def nearest(given: str, names: Sequence[str]) -> str | None:
    """Return the name that was most likely meant, or None when none is near."""
    from drl.catalog import nearest_name

    return nearest_name(given, names)


def did_you_mean(given: str, names: Sequence[str]) -> str:
    """Return "; did you mean 'x'?", or nothing when no name is near."""
    close = nearest(given, names)
    return f"; did you mean '{close}'?" if close is not None else ""


def explain_error(error: ErrorDetails, later: Sequence[str]) -> str:
    """Say what a value must be and what it was. ``later``: values that a later release takes."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if isinstance(given, str) and given in later:
        return f"{shown(given)} is a known value, not available in drl {RELEASE}"
    if kind == "literal_error":
        return _not_a_choice(context["expected"], given)
    if kind == "value_error":
        return f"{context['error']}, got {shown(given)}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, got {shown(given)}"
    if kind == "missing":
        return "is required"
    if kind in _LIMITS:
        template, limit = _LIMITS[kind]
        if template.startswith("must have") and context[limit] == 1:
            return f"must not be empty, got {shown(given)}"
        return f"{template.format(limit_text(context[limit]))}, got {shown(given)}"
    first = kind.split("_", maxsplit=1)[0]
    known = _FIXED.get(first)
    hint = "; write it in quotes" if first == "string" and isinstance(given, (int, float)) else ""
    message = known if known is not None else error["msg"][:1].lower() + error["msg"][1:]
    return f"{message}, got {shown(given)}{hint}"


def _not_a_choice(expected: str, given: Any) -> str:
    choices = [choice.strip().strip("'") for choice in expected.replace(" or ", ", ").split(",")]
    close = did_you_mean(given, choices) if isinstance(given, str) else ""
    allowed = (
        f"must be one of {', '.join(choices)}" if len(choices) > 1 else f"must be {choices[0]}"
    )
    return f"{allowed}, got {shown(given)}{close}"


def mixed_up(given: Any, taken: Any) -> str | None:
    """Say what a scalar must be when pydantic took another type for it, as "4" for 4; else None."""
    if isinstance(given, (list, tuple)) and isinstance(taken, (list, tuple)):
        pairs = zip(given, taken, strict=False)
        return next((said for pair in pairs if (said := mixed_up(*pair)) is not None), None)
    checks: tuple[tuple[bool, Callable[[], str]], ...] = (
        (_is_number(taken) and isinstance(given, bool), lambda: _number(taken)),
        (
            _is_number(taken) and isinstance(given, str) and not given.strip()[-1:].isalpha(),
            lambda: f"{_number(taken)} without quotes",
        ),
        (
            isinstance(taken, bool) and not isinstance(given, bool),
            lambda: "must be true or false",
        ),
    )
    return next((f"{say()}, got {shown(given)}" for wrong, say in checks if wrong), None)


def _number(taken: Any) -> str:
    return "must be a whole number" if isinstance(taken, int) else "must be a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def help_of(model: type[Options], key: str) -> str:
    """Return the description of a field, or nothing."""
    field = model.model_fields.get(key)
    return field.description or "" if field is not None else ""
