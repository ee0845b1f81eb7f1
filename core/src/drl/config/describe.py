"""What a field of an option model is, in words: from the JSON schema that pydantic makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from drl.config.messages import limit_text, shown

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from drl.options import Options

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "object": "table",
}

_LIMITS = {
    "exclusiveMinimum": "above {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "at most {}",
    "multipleOf": "a multiple of {}",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "maxLength": "at most {} characters",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One option: ``default`` is the text of a TOML value, "required" or "unset"."""

    key: str
    kind: str
    default: str
    limits: str
    help: str


def described(model: type[Options]) -> Iterator[Described]:
    """Yield every option of a model, in its order."""
    schema = model.model_json_schema()
    for key, field in model.model_fields.items():
        rule = without_null(schema["properties"][key])
        yield Described(
            key=key,
            kind=_kind(rule, schema.get("$defs", {})),
            default=_default(... if field.is_required() else given_default(field)),
            limits=", ".join(_limits(rule)),
            help=field.description or "",
        )


def without_null(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without null, which a recipe cannot hold."""
    choices = [choice for choice in rule.get("anyOf", ()) if choice.get("type") != "null"]
    kept = {key: value for key, value in rule.items() if key not in {"anyOf", "later"}}
    if len(choices) == 1:
        kept |= choices[0]
    elif choices:
        kept["anyOf"] = choices
    if kept.get("default", "") is None:
        del kept["default"]
    return kept


def _kind(rule: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "const" in rule:
        return shown(rule["const"])
    if "enum" in rule:
        return " or ".join(shown(value) for value in rule["enum"])
    if "$ref" in rule:
        return _kind(definitions[rule["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in rule:
        return " or ".join(_kind(choice, definitions) for choice in rule["anyOf"])
    if rule.get("type") == "array":
        return f"list of {_entries(rule, definitions)}"
    if "properties" in rule:
        return f"{{{', '.join(rule['properties'])}}}"
    if rule.get("format") in {"path", "file-path", "directory-path"}:
        return "path"
    return _TYPES.get(rule.get("type", ""), "any value")


def _entries(rule: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "prefixItems" in rule:
        kinds = [_kind(entry, definitions) for entry in rule["prefixItems"]]
        return f"{len(kinds)} entries ({', '.join(kinds)})"
    return _kind(rule.get("items", {}), definitions)


def _limits(rule: Mapping[str, Any]) -> Iterator[str]:
    fixed = "prefixItems" in rule
    for name, template in _LIMITS.items():
        if name in rule and not (fixed and name.endswith("Items")):
            yield template.format(limit_text(rule[name]))


def given_default(field: FieldInfo) -> Any:
    """Return the default of a field; that of a table is made by the table."""
    if field.default_factory is None:
        return field.get_default()
    return field.get_default(call_default_factory=True)


def _default(value: Any) -> str:
    if value is ...:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key} = {_default(one)}" for key, one in value) + "}"
    return shown(value)
