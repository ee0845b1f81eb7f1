"""Declares the loss ``dpo``, the data source ``preferences``, and the logger that makes such data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drl.api import Component, Problem, hookimpl

DRL_API = (1, 0)
LOSS, PREFERENCES = "dpo", "preferences"
SINGLE = frozenset({"glyphs", "hf_dataset", "image_folder", "jsonl"})
"""Known sources of one medium per row; a stranger's may give two."""


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer direct preference optimisation."""
    return [
        Component(
            LOSS,
            "drl_loss_dpo.loss:Dpo",
            summary="Prefers the better of two recorded pictures, against a reference (Diffusion-DPO).",
            config="drl_loss_dpo.config:DpoConfig",
            facts={"needs": ("reference",)},
        )
    ]


@hookimpl
def drl_register_data_sources() -> Sequence[Component]:
    """Offer rows of two pictures."""
    return [
        Component(
            PREFERENCES,
            "drl_loss_dpo.source:PreferenceSource",
            summary="Text, chosen and rejected picture from a JSON-lines file.",
            config="drl_loss_dpo.config:PreferencesConfig",
        )
    ]


@hookimpl
def drl_register_loggers() -> Sequence[Component]:
    """Offer making such rows from a run's own samples."""
    return [
        Component(
            PREFERENCES,
            "drl_loss_dpo.logger:PreferenceLogger",
            summary="Writes best and worst picture of each group, for the data source preferences.",
            config="drl_loss_dpo.config:PreferenceLoggerConfig",
        )
    ]


@hookimpl
def drl_check_recipe(recipe: Any) -> Iterable[Problem]:
    """Refuse data without pairs and models with parts; say which options the loss does not read."""
    if recipe.data.source == PREFERENCES:
        yield from _of_the_source(recipe)
    if recipe.algorithm.loss == LOSS:
        yield from _of_the_loss(recipe)
    if PREFERENCES in recipe.logging.loggers:
        yield from _of_the_logger(recipe)


def _of_the_source(recipe: Any) -> Iterable[Problem]:
    if recipe.data.prompt_data is None:
        yield Problem(
            "data.prompt_data",
            f"is required by data.source '{PREFERENCES}': a .jsonl file of rows with chosen and rejected",
        )
    if recipe.algorithm.loss != LOSS:
        yield Problem(
            "data.source",
            f"'{PREFERENCES}' gives two pictures a row, of which algorithm.loss {recipe.algorithm.loss!r} "
            f"does not read the rejected one; '{LOSS}' does",
            "warning",
        )


def _of_the_loss(recipe: Any) -> Iterable[Problem]:
    if recipe.data.source in SINGLE:
        yield Problem(
            "data.source",
            f"{recipe.data.source!r} gives no pairs, but algorithm.loss '{LOSS}' trains on a chosen and a "
            f"rejected picture: use '{PREFERENCES}'",
        )
    if recipe.algorithm.kl_beta > 0:
        yield Problem(
            "algorithm.kl_beta",
            f"is not read: algorithm.{LOSS}.beta holds the model to its reference",
            "warning",
        )
    if len(recipe.model.components) > 1:
        yield Problem(
            "model.components",
            f"algorithm.loss '{LOSS}' trains one component, got {', '.join(recipe.model.components)}",
        )


def _of_the_logger(recipe: Any) -> Iterable[Problem]:
    if recipe.train.train_only:
        yield Problem(
            "logging.loggers",
            f"'{PREFERENCES}' writes samples of rollouts, but train.train_only has none",
        )
    elif recipe.rollout.n_samples_per_prompt == 1:
        yield Problem(
            "rollout.n_samples_per_prompt",
            f"is 1, but the logger '{PREFERENCES}' pairs samples of one prompt: set it to 2 or more",
        )
    if recipe.sampling.num_frames > 1:
        yield Problem(
            "sampling.num_frames",
            f"is {recipe.sampling.num_frames}, but the logger '{PREFERENCES}' writes pictures: set it to 1",
        )
