"""Rules of adapters: two spellings of one option, and an adapter that a run starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drl.config.adapter_file import (
    CONFIG_FILE,
    RECIPE_KEYS,
    adapter_directories,
    adapter_settings,
)
from drl.config.automatic import needs
from drl.config.draft import Draft
from drl.config.messages import shown
from drl.errors import Problem

SPELLINGS = (("rank", "r"), ("alpha", "lora_alpha"), ("target_modules", "lora_modules"))


def two_spellings(draft: Draft) -> Iterator[Problem]:
    """An option that is given in both spellings has one value."""
    for ours, other in SPELLINGS:
        if draft.given(f"lora.{ours}") and draft.given(f"lora.{other}"):
            one, two = draft.get(f"lora.{ours}"), draft.get(f"lora.{other}")
            if one != two:
                yield Problem(
                    f"lora.{other}",
                    f"is another spelling of lora.{ours}, which is {shown(one)}, got {shown(two)}; "
                    "give one of them",
                )


def layers(draft: Draft) -> Iterator[Problem]:
    """Layer numbers go with lists of names; an orthogonal start needs even ranks."""
    numbers, pattern = draft.get("lora.layers_to_transform"), draft.get("lora.layers_pattern")
    for key in ("lora.target_modules", "lora.lora_modules"):
        if numbers is not None and isinstance(draft.get(key), str):
            yield Problem(
                "lora.layers_to_transform",
                f"needs a list of names in {key}; write the numbers into the regular expression",
            )
    if pattern is not None and numbers is None:
        yield Problem("lora.layers_pattern", "has no use without lora.layers_to_transform")
    ranks = (draft.get("lora.rank"), *(rank for _, rank in draft.get("lora.rank_pattern")))
    if draft.get("lora.init_weights") == "orthogonal" and any(rank % 2 for rank in ranks):
        yield Problem("lora.init_weights", f"'orthogonal' needs even ranks, got {list(ranks)}")


def unused(draft: Draft) -> Iterator[Problem]:
    """Options of adapters without adapters are a mistake more often than not."""
    if draft.get("lora.enabled"):
        return
    if draft.get("lora.adapter_path") is not None:
        yield Problem("lora.adapter_path", "needs lora.enabled = true")
    for key in type(draft.sections["lora"]).model_fields:
        if key not in ("enabled", "adapter_path") and _is_changed(draft, f"lora.{key}"):
            yield Problem(f"lora.{key}", "is not used: lora.enabled is false", "warning")


def nothing_to_train(draft: Draft) -> Iterator[Problem]:
    """A run trains."""
    if draft.get("lora.enabled") and not draft.get("lora.is_trainable"):
        yield Problem(
            "lora.is_trainable",
            "false leaves no trainable adapters, so a run has nothing to train; set it to true, or "
            "take drl sample to use the adapter",
        )


def dropout(draft: Draft) -> Iterator[Problem]:
    """Ratios compare the trainer with a rollout that drops nothing."""
    if draft.get("lora.dropout") and needs(draft, "old_log_prob"):
        yield Problem(
            "lora.dropout",
            "makes the trainer's log-probs random while those of the rollout are not: ratios start "
            "away from 1; losses that compare the two want 0",
            "warning",
        )


def start_adapter(draft: Draft) -> Iterator[Problem]:
    """The adapter that a run starts from exists and is what the recipe says of it."""
    path = draft.get("lora.adapter_path")
    if path is None:
        return
    for component, directory in adapter_directories(path, draft.get("model.components")).items():
        stored = adapter_settings(directory)
        if stored is None:
            yield Problem(
                "lora.adapter_path",
                f"{component}: {directory} has no readable {CONFIG_FILE}; give a PEFT directory, "
                "with one folder per component where there are several",
            )
            return
        for field, keys in RECIPE_KEYS.items():
            for key in keys:
                if _is_given(draft, f"lora.{key}"):
                    yield from _compare(draft, f"lora.{key}", stored.get(field), directory)
    if draft.get("lora.init_weights") != "gaussian":
        yield Problem(
            "lora.init_weights", "is not used: the adapters start from lora.adapter_path", "warning"
        )


def _is_given(draft: Draft, path: str) -> bool:
    # of a table only the entries are given
    return draft.given(path) or (path.endswith("_pattern") and bool(draft.get(path)))


def _is_changed(draft: Draft, path: str) -> bool:
    # a run's own recipe gives every default
    return bool(draft.get(path)) if path.endswith("_pattern") else draft.changed(path)


def _compare(draft: Draft, path: str, stored: Any, directory: Any) -> Iterator[Problem]:
    value = draft.get(path)
    if _plain(value) != _plain(stored):
        yield Problem(
            path,
            f"is {shown(value)}, but the adapter in {directory} has {shown(stored)}; take it out, "
            "the adapter's own value counts",
        )


def _plain(value: Any) -> Any:
    """Return a value so that an absent, an empty and an unordered one compare as they should."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        entries = [tuple(entry) if isinstance(entry, list) else entry for entry in value]
        return sorted(entries, key=repr) or None
    return value if value not in ("", 0, False) else None


LORA_RULES = (two_spellings, layers, unused, nothing_to_train, dropout, start_adapter)
