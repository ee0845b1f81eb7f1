"""Losses with SDE backends, step strategies and references: what makes sense passes, the rest is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from e2e import metric_rows, run_here, write_recipe

from drl.catalog import Catalog
from drl.config import load_recipe
from drl.config.machine import Machine
from drl.errors import Problem, RecipeError

TEXT = """
[model]
checkpoint = "stabilityai/stable-diffusion-3.5-medium"
[lora]
enabled = true
[train]
num_rollout = 2
[sampling]
num_steps = 10
guidance_scale = 1.0
[rollout]
batch_size = 2
n_samples_per_prompt = 4
[data]
prompt_data = "prompts.jsonl"
"""
REWARD = """
[reward]
type = "jpeg"
"""
RECORDED = {"sft_loss": "jsonl", "dpo": "preferences"}
STRATEGIES = {
    "none": {"sde.num_steps": 0},
    "first": {"sde.num_steps": 10},
    "window": {
        "sde.step_strategy": "sde_window",
        "sde.num_steps": 2,
        "sde.sde_window.range": [0, 9],
    },
    "random": {
        "sde.step_strategy": "epoch_global_random_choice",
        "sde.num_steps": 2,
        "sde.epoch_global_random_choice.candidate_steps": [1, 2, 3],
    },
    "all": {"sde.step_strategy": "all"},
    "last": {"sde.step_strategy": "ode_and_return_last"},
}
STEPS = """
                     none   first  window random all    last
policy_loss  sde     S      w      .      .      .      S
policy_loss  cps     S      w      .      .      .      S
policy_loss  dance   S      w      .      .      .      S
policy_loss  ode     DS     D      D      D      D      DS
grpo_guard   sde     S      w      .      .      .      S
grpo_guard   cps     GS     G      G      G      G      GS
grpo_guard   dance   S      w      .      .      .      S
grpo_guard   ode     DS     D      D      D      D      DS
nft          sde     n      .      F      F      .      n
nft          cps     n      .      F      F      .      n
nft          dance   n      .      F      F      .      n
nft          ode     .      n      F      F      k      .
awm          sde     n      .      F      F      .      n
awm          cps     n      .      F      F      .      n
awm          dance   n      .      F      F      .      n
awm          ode     .      n      F      F      N      .
sft_loss     sde     .      u      uu     uu     u      u
sft_loss     ode     u      uu     uuu    uuu    uu     uu
dpo          sde     .      u      uu     uu     u      u
dpo          ode     u      uu     uuu    uuu    uu     uu
"""
"""Small letters are warnings, capitals errors; a dot is silence."""
SAID = {
    "S": "stochastic step",
    "D": "has no density",
    "G": "normalises the ratio of Flow-SDE's Gaussian steps",
    "F": "trains on the final ones",
    "N": "has no stochastic step",
    "w": "the first 10 steps are stochastic in every sample",
    "n": "which is not used",
    "k": "keeps every latent",
    "u": "runs without rollouts",
}

Found = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.load()


@pytest.fixture
def check(tmp_path: Path, catalog: Catalog) -> Any:
    """Errors and warnings of the recipe with these options, each as ``path: message``."""

    def run(loss: str, changes: dict[str, Any]) -> Found:
        try:
            recipe = loaded(tmp_path, catalog, loss, changes)
        except RecipeError as refusal:
            return split(refusal.problems)
        return split(recipe.warnings)

    return run


def loaded(folder: Path, catalog: Catalog, loss: str, changes: dict[str, Any]) -> Any:
    """Return the resolved recipe; RecipeError with its problems."""
    (folder / "prompts.jsonl").write_text('{"input": "a sign"}\n')
    file = folder / "recipe.toml"
    file.write_text(TEXT if loss in RECORDED else TEXT + REWARD)
    values = {"algorithm.loss": loss} | changes
    if loss in RECORDED:
        values |= {"train.train_only": True, "data.source": RECORDED[loss]}
    sets = [f"{path}={toml(v)}" for path, v in values.items()]
    return load_recipe(file, sets=sets, catalog=catalog, machine=Machine())


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def split(problems: Any) -> Found:
    def texts(severity: str) -> list[str]:
        kept: list[Problem] = [p for p in problems if p.severity == severity]
        return [f"{p.path}: {p.message}" for p in kept]

    return texts("error"), texts("warning")


def rows() -> list[tuple[str, str, str, str]]:
    header, *lines = STEPS.strip().splitlines()
    return [
        (loss, kind, strategy, code)
        for loss, kind, *codes in map(str.split, lines)
        for strategy, code in zip(header.split(), codes, strict=True)
    ]


def test_every_step_of_every_backend_with_every_loss(check: Any) -> None:
    wrong = []
    for loss, kind, strategy, code in rows():
        errors, warnings = check(loss, {"sde.type": kind} | STRATEGIES[strategy])
        capitals = [SAID[letter] for letter in code if letter.isupper()]
        small = [SAID[letter] for letter in code if letter.islower()]
        right = len(errors) == len(capitals) and all(
            any(said in error for error in errors) for said in capitals
        )
        if not capitals:
            right &= len(warnings) == len(small)
            right &= all(any(said in warning for warning in warnings) for said in small)
        if not right:
            wrong.append((loss, kind, strategy, code, errors, warnings))
    assert wrong == []


def test_the_table_has_every_installed_loss_backend_and_strategy(catalog: Catalog) -> None:
    table = rows()
    assert {loss for loss, *_ in table} == set(catalog.names("loss")) - {"custom_loss"}
    assert {kind for _, kind, *_ in table} == set(catalog.names("sde_backend"))
    named = {changes.get("sde.step_strategy") for changes in STRATEGIES.values()}
    assert named == {None, *catalog.names("step_strategy")}


def test_a_backend_that_is_proposed_is_accepted(check: Any) -> None:
    """What the message on ``ode`` offers must not be refused by the next message."""
    for loss in ("policy_loss", "grpo_guard"):
        ((message,), _) = check(loss, {"sde.type": "ode"} | STRATEGIES["window"])
        offered = [
            kind for kind in ("sde", "cps", "dance") if f"'{kind}'" in message.split("use")[1]
        ]
        assert offered
        for kind in offered:
            assert check(loss, {"sde.type": kind} | STRATEGIES["window"]) == ([], [])


AVERAGE = {"ema.enabled": True, "ema.rollout_policy": "ema"}
PLAIN, OLD = ("policy_loss", "awm"), ("grpo_guard", "nft")
"""Losses without, and with, an old policy to compare with; an average is that old policy."""
BASE = {
    "policy_loss": {"sde.type": "sde"} | STRATEGIES["window"],
    "grpo_guard": {"sde.type": "sde"} | STRATEGIES["window"],
    "nft": {"sde.type": "ode"},
    "awm": {"sde.type": "ode"},
    "sft_loss": {},
    "dpo": {},
}


def options(loss: str, beta: float, average: bool, mode: str | None, **more: Any) -> dict[str, Any]:
    values = BASE[loss] | {"algorithm.kl_beta": beta} | (AVERAGE if average else {}) | more
    return values if mode is None else values | {"algorithm.ref_mode": mode}


@pytest.mark.parametrize(
    ("losses", "beta", "average", "mode", "resolved"),
    [
        (PLAIN + OLD, 0, False, None, "none"),
        (PLAIN + OLD, 0.1, False, None, "lora_base"),
        (PLAIN, 0.1, True, None, "lora_base"),
        (OLD, 0, True, None, "ema"),
        (OLD, 0.1, True, None, "lora_base"),
        (PLAIN + OLD, 0, False, "none", "none"),
        (PLAIN + OLD, 0.1, False, "lora_base", "lora_base"),
        (OLD, 0.1, True, "lora_base", "lora_base"),
        (PLAIN, 0.1, True, "ema", "ema"),
        (OLD, 0, True, "ema", "ema"),
        (("sft_loss",), 0, False, None, "none"),
        (("dpo",), 0, False, None, "lora_base"),
        (("dpo",), 0, False, "lora_base", "lora_base"),
    ],
)
def test_references_that_make_sense(
    tmp_path: Path,
    catalog: Catalog,
    check: Any,
    losses: tuple[str, ...],
    beta: float,
    average: bool,
    mode: str | None,
    resolved: str,
) -> None:
    for loss in losses:
        changes = options(loss, beta, average, mode)
        errors, warnings = check(loss, changes)
        # the ratio of a policy loss starts away from 1 when the average rolls out
        noted = [w for w in warnings if not w.startswith("ema.rollout_policy")]
        assert (errors, noted) == ([], [])
        recipe: Any = loaded(tmp_path, catalog, loss, changes)
        assert recipe.algorithm.ref_mode == resolved


@pytest.mark.parametrize(
    ("losses", "beta", "average", "mode", "said"),
    [
        (PLAIN, 0.1, False, "none", "ref_mode: is 'none'.*; use 'lora_base' or 'ema'$"),
        (OLD, 0.1, False, "none", "ref_mode: is 'none'.*reference; use 'lora_base'$"),
        (OLD, 0.1, True, "none", "ref_mode: is 'none'.*reference; use 'lora_base'$"),
        (PLAIN + OLD + ("dpo",), 0, False, "ema", "ref_mode: is 'ema', but there is no average"),
        (OLD, 0.1, True, "ema", "kl_beta: is 0.1, but the average .* is the old policy"),
        (("dpo",), 0, False, "none", "ref_mode: is 'none', but .* 'dpo' compares with a reference"),
    ],
)
def test_references_that_make_no_sense_are_refused(
    check: Any, losses: tuple[str, ...], beta: float, average: bool, mode: str, said: str
) -> None:
    for loss in losses:
        (message,), _ = check(loss, options(loss, beta, average, mode))
        assert re.search(said, message.split("   (--set)")[0]), message


@pytest.mark.parametrize("loss", [*PLAIN, *OLD])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("mode", [None, "lora_base"])
def test_a_reference_without_an_adapter_is_refused_with_ways_out_that_work(
    check: Any, loss: str, average: bool, mode: str | None
) -> None:
    full = {"lora.enabled": False}
    (message,), _ = check(loss, options(loss, 0.1, average, mode, **full))
    assert message.startswith("algorithm.kl_beta" if mode is None else "algorithm.ref_mode")
    assert "set lora.enabled = true, or algorithm." in message
    assert check(loss, options(loss, 0.1, average, mode))[0] == []
    if loss in OLD:
        assert message.partition(", or ")[2].startswith("algorithm.kl_beta = 0")
        assert check(loss, options(loss, 0, average, None, **full))[0] == []
    else:
        assert check(loss, options(loss, 0.1, True, "ema", **full))[0] == []


@pytest.mark.parametrize(
    ("loss", "changes", "said"),
    [
        (
            "policy_loss",
            {"algorithm.ref_mode": "lora_base"},
            "ref_mode: is not used: .*kl_beta is 0",
        ),
        ("awm", AVERAGE | {"algorithm.ref_mode": "ema"}, "ref_mode: is not used: .*kl_beta is 0"),
        ("nft", {"algorithm.ref_mode": "lora_base"}, "old policy are those of its rollout"),
        (
            "nft",
            AVERAGE | {"algorithm.ref_mode": "lora_base"},
            "old policy are the average of the w",
        ),
        ("sft_loss", {"algorithm.kl_beta": 0.1}, "kl_beta: is not used: .* has no KL term"),
        ("sft_loss", {"algorithm.ref_mode": "lora_base"}, "ref_mode: is not used: .* no KL term"),
        (
            "sft_loss",
            {"algorithm.adv_clip_max": 1.0},
            "adv_clip_max: is not used: .* without rewards",
        ),
        (
            "dpo",
            {"algorithm.advantage_estimator": "gdpo"},
            "advantage_estimator: is not used: .* without rewards",
        ),
        (
            "awm",
            {"algorithm.advantage_estimator": "gdpo"},
            "normalises each of several reward.terms",
        ),
        ("awm", {"rollout.n_samples_per_prompt": 1}, "every advantage is 0 and nothing is learned"),
        (
            "awm",
            {
                "rollout.n_samples_per_prompt": 1,
                "algorithm.grpo.globalize_mean": True,
                "algorithm.grpo.globalize_std": True,
            },
            "a sample is compared with the mean of the rollout",
        ),
        (
            "awm",
            {"algorithm.grpo.std_normalization": False, "algorithm.grpo.globalize_std": True},
            "globalize_std: is not used: std_normalization is false",
        ),
    ],
)
def test_what_has_no_effect_is_said(
    check: Any, loss: str, changes: dict[str, Any], said: str
) -> None:
    errors, (warning,) = check(loss, BASE[loss] | changes)
    assert errors == []
    assert re.search(said, warning), warning


@pytest.mark.parametrize(
    "option",
    [
        {"sde.backend": "sde"},
        {"reward.type": "jpeg"},
        {"reward.group": True},
        {"sync.verify": "off"},
        {"trust.parity": False},
        {"rollout.over_sampling_batch_size": 9},
        {"rollout.buffer_filter": "pop_first"},
    ],
)
def test_a_supervised_run_names_once_what_it_does_not_use(
    check: Any, option: dict[str, Any]
) -> None:
    (path,) = option
    for loss in RECORDED:
        said = f"{path}: is not used: train.train_only runs without rollouts"
        assert check(loss, option) == ([], [f"{said}   (--set)"])


def test_a_run_that_starts_from_an_adapter_starts_away_from_the_base(
    check: Any, tmp_path: Path
) -> None:
    config = '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["to_q"]}'
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(config)
    start = {"lora.adapter_path": str(tmp_path / "adapter")}
    for loss, beta in (("policy_loss", 0.1), ("dpo", 0)):
        errors, (warning,) = check(loss, options(loss, beta, False, None, **start))
        assert errors == []
        assert "the run starts away from it" in warning
    assert check("policy_loss", options("policy_loss", 0, False, None, **start)) == ([], [])


RUNS = [
    (loss, kind, strategy)
    for loss, kind, strategy, code in rows()
    if code in ".w" and loss not in RECORDED and strategy in {"window", "random", "all", "last"}
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "kind", "strategy"), RUNS)
def test_every_combination_that_passes_trains(
    checkpoint: Path, tmp_path: Path, loss: str, kind: str, strategy: str
) -> None:
    """One rollout and two optimizer steps of the tiny model; its guidance of 1 suits every loss."""
    recipe = write_recipe(tmp_path, checkpoint)
    changes = STRATEGIES[strategy] | {"algorithm.loss": loss, "sde.type": kind}
    changes |= {"sampling.num_steps": 4, "train.num_rollout": 1, "train.num_steps_per_rollout": 2}
    if strategy == "window":
        changes["sde.sde_window.range"] = [0, 3]
    quiet = ("eval.before_train=false", "eval.after_train=false")
    run_here(recipe, tmp_path / "run", *quiet, *(f"{p}={toml(v)}" for p, v in changes.items()))
    (row,) = metric_rows(tmp_path / "run")
    assert row["train/grad_norm"] > 0
    assert row["train/skipped_steps"] == 0
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
