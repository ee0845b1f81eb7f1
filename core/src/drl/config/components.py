"""Which components a recipe picks, and the options of each. Imports light config modules only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drl.config.draft import Draft, NotKnown
from drl.config.flags import RELEASE, coming_component
from drl.config.secrets import PREFIX
from drl.config.signatures import from_source, mismatch
from drl.config.structure import kinds_of, report_stray_table, unknown_option, without_path
from drl.config.validation import checked, secret_keys
from drl.dotted import is_dotted, table_name
from drl.errors import BrokenPlugin, ComponentConflict, ContractError, UnknownComponent
from drl.kinds import BY_NAME, FUNCTION, SLOTS, Kind
from drl.options import Options

ROLLOUT_KINDS = frozenset({"engine", "sde_backend", "advantage", "updater"})
"""Kinds whose default pick a supervised run does not need."""

_OTHERWISE = frozenset({"reward", "logger", FUNCTION})
"""Kinds of which a recipe may pick several."""

LATER = "is checked when the run starts"


@dataclass(frozen=True, slots=True)
class Pick:
    """A component that the recipe names; ``table`` is the name of its option table."""

    kind: str
    name: str
    path: str
    table: str


def picks(draft: Draft) -> Iterator[Pick]:
    """Yield what the recipe picks, without the picks that are themselves wrong."""
    single = [kind for kind in BY_NAME.values() if kind.name not in _OTHERWISE]
    for kind in single:
        name = _value(draft, kind.option)
        if name is not None and (kind.name, name) != ("updater", "auto"):
            yield Pick(kind.name, name, _chosen_by(draft, kind), name)
    if (backend := _value(draft, "sde.backend")) not in (None, _value(draft, "sde.type")):
        yield Pick("sde_backend", backend, "sde.backend", backend)
    for name in _value(draft, "logging.loggers") or ():
        yield Pick("logger", name, "logging.loggers", name)
    if (only := _value(draft, "reward.type")) is not None:
        yield Pick("reward", only, "reward.type", table_name(only))
    for term in _value(draft, "reward.terms") or ():
        yield Pick("reward", term.component, "reward.terms", term.name)


def _chosen_by(draft: Draft, kind: Kind) -> str:
    """Return the option that picks a component; a family has two."""
    by_path = "model.pipeline_config"
    return by_path if kind.name == "family" and draft.given(by_path) else kind.option


def _value(draft: Draft, path: str) -> Any:
    try:
        return draft.get(path)
    except NotKnown:
        return None


def find_components(draft: Draft) -> None:
    """Find the picked components, check the options of all tables, report the tables nobody owns."""
    chosen = list(picks(draft))
    supervised = _value(draft, "train.train_only") is True
    for pick in chosen:
        optional = supervised and pick.kind in ROLLOUT_KINDS and not draft.given(pick.path)
        _find(draft, pick, optional=optional)
    for slot in SLOTS:
        if (name := _value(draft, slot.option)) is not None:
            _find_function(draft, slot.option, name)
    _check_tables(draft, chosen)


def _find_function(draft: Draft, option: str, name: str) -> None:
    """Find the function of a slot, and compare it with the slot as far as its source tells."""
    try:
        entry = draft.catalog.find(FUNCTION, name, option)
    except (UnknownComponent, BrokenPlugin, ComponentConflict) as error:
        draft.error(option, without_path(str(error), option))
        return
    try:
        found = draft.catalog.definition(entry.component.target)
    except UnknownComponent as error:  # of a registered one: its plugin is to blame
        draft.error(option, f"{name!r} of {entry.owner} is broken: {error}")
        return
    draft.entries[FUNCTION, option] = entry
    if found.function is None:
        draft.warn(option, f"{entry.component.target} {LATER}: {found.why}")
        return
    reason = mismatch(option, entry.component.target, from_source(found.function))
    if reason is not None:
        draft.error(option, reason)


def _find(draft: Draft, pick: Pick, *, optional: bool) -> None:
    try:
        entry = draft.catalog.find(pick.kind, pick.name)
    except (UnknownComponent, BrokenPlugin, ComponentConflict) as error:
        if not optional:
            draft.error(pick.path, f"{without_path(str(error), pick.path)}{_coming(pick)}")
        return
    draft.entries[pick.kind, pick.name] = entry
    if is_dotted(pick.name):
        _check_dotted(draft, pick)
    section = BY_NAME[pick.kind].section
    _check_options(draft, pick.kind, pick.name, f"{section}.{pick.table}")


def _check_dotted(draft: Draft, pick: Pick) -> None:
    """Say what cannot be known of a class before it is imported."""
    found = draft.catalog.definition(pick.name)
    facts = draft.entries[pick.kind, pick.name].component.facts
    if pick.kind == "loss" and "needs" not in facts:
        draft.error(
            pick.path,
            f"{pick.name} does not say what it needs where it can be read without importing it: "
            "write  needs = frozenset({Need.ROLLOUT, ...})  in the body of the class",
        )
    elif found.kind == "unclear":
        draft.warn(pick.path, f"{pick.name} {LATER}: {found.why}")


def _coming(pick: Pick) -> str:
    """Say that a component is known and comes with a later release."""
    row = coming_component(BY_NAME[pick.kind].section, pick.name)
    known = f"known, not available in drl {RELEASE} (owner {row.owner})" if row is not None else ""
    return f"\n{known}" if known else ""


def _check_options(draft: Draft, kind: str, name: str, path: str) -> None:
    """Put the validated options of a component into ``draft.options``."""
    table = draft.tables.get(path, {})
    key = path.partition(".")[2]
    try:
        model = draft.catalog.options_model(kind, name)
    except (BrokenPlugin, ContractError) as error:
        draft.error(path, without_path(str(error), path))
        return
    if model is None:
        for given, value in table.items():
            reason = f"{kind.replace('_', ' ')} '{name}' has no options"
            draft.error(f"{path}.{given}", f"unknown option: {reason}, got {type(value).__name__}")
        draft.options[kind, key] = None
        return
    instance = _checked_table(draft, model, table, path)
    draft.options[kind, key] = instance
    if instance is not None:
        _refuse_open_secrets(draft, instance, path)


def _checked_table(
    draft: Draft, model: type[Options], table: Mapping[str, Any], path: str
) -> Options | None:
    known, fields = dict(table), model.model_fields
    # First, because the better message for a key that moved or comes later needs its whole path.
    for key in [key for key in known if key not in fields]:
        value = known.pop(key)
        message = unknown_option(draft, f"{path}.{key}", value)
        draft.error(f"{path}.{key}", _nearest_field(message, key, model))
    instance = checked(draft, model, known, path)
    return instance if isinstance(instance, Options) else None


def _nearest_field(message: str, key: str, model: type[Options]) -> str:
    from drl.config.messages import did_you_mean

    near = did_you_mean(key, list(model.model_fields))
    return f"unknown option{near}" if message.startswith("unknown") and near else message


def _refuse_open_secrets(draft: Draft, options: Options, path: str) -> None:
    """A secret stands in a recipe as env:NAME, because run directories keep recipes."""
    for key in secret_keys(type(options)):
        secret = vars(options)[key]
        if secret is not None and not secret.get_secret_value().startswith(PREFIX):
            draft.error(
                f"{path}.{key}", 'is a secret: write "env:NAME", the variable that holds it'
            )


def _check_tables(draft: Draft, chosen: list[Pick]) -> None:
    """Check tables of components that are installed and not picked; report all other tables."""
    used = {(BY_NAME[pick.kind].section, pick.table) for pick in chosen}
    known = {(BY_NAME[kind].section, name) for kind, name in draft.options}
    for path, table in draft.tables.items():
        section, _, name = path.partition(".")
        if (section, name) in used | known:
            continue
        owners = [kind.name for kind in kinds_of(section) if name in draft.catalog.names(kind.name)]
        if not owners:
            report_stray_table(draft, path, table)
        else:
            _check_options(draft, owners[0], name, path)
            # with "auto" any updater may be chosen once the engine is known
            if (owners[0], _value(draft, "sync.updater")) != ("updater", "auto"):
                draft.warn(path, f"is not used: {_pick_of(draft, owners[0])}")


def _pick_of(draft: Draft, kind: str) -> str:
    option = BY_NAME[kind].option
    if kind == "reward":
        return "no reward term has this name; it counts where rows ask for it (metadata.rm_type)"
    value = _value(draft, option)
    if value is None:
        return f"{option} is not set"
    picked = ", ".join(value) if isinstance(value, tuple) else value
    return f"{option} is {picked!r}"
