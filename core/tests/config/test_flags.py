"""The 204 flags of the seeds: each has a place, an owner, and an answer when it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from drl.catalog import Catalog, known_plugins
from drl.config.explain import own_tables
from drl.config.flags import (
    CORE,
    Known,
    core_options,
    extra_rows,
    flag_rows,
    known_keys,
    moved_keys,
)
from drl.config.layers import nested
from drl.config.rules.served import SERVED_ONLY
from drl.config.sections import SECTIONS
from drl.kinds import KINDS, SLOTS

Problems = Callable[..., dict[str, str]]
MISSING = [row for row in flag_rows() if "." in row.key and not row.available and not row.value]
PRESENT = [row for row in flag_rows() if "." in row.key and row.available]
MISSING_EXTRA = [row for row in extra_rows() if not row.available]


def value_of(row: Known) -> Any:
    """A value to write: tables that are passed through need one entry."""
    return {"mem_fraction": 0.6} if row.key.endswith(".args") else False


def core_keys() -> set[str]:
    """Every option of core's sections; those of a table inside a section one by one."""
    keys = {f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}
    for section in SECTIONS:
        for name, table in own_tables(section).items():
            keys.remove(f"{section}.{name}")
            keys |= {f"{section}.{name}.{key}" for key in table.model_fields}
    return keys


def test_there_is_one_row_for_each_of_the_204_flags() -> None:
    rows = flag_rows()
    assert len(rows) == 204
    assert len({row.flag for row in rows}) == 204


def test_four_flags_have_no_key() -> None:
    assert [row.flag for row in flag_rows() if not row.key] == [
        "--field-name",
        "--help",
        "MILES_VERIFY_WEIGHT_SYNC",
        "SGLANG_DIFFUSION_LORA_MERGE_FP32",
    ]


def test_flags_without_a_dotted_key_are_the_override_file_and_the_lora_prefix() -> None:
    keys = {row.flag: row.key for row in flag_rows() if row.key and "." not in row.key}
    assert keys == {"--custom-config-path": "--override", "--lora-": "lora"}


def test_only_aliases_share_a_key() -> None:
    keys = Counter(row.key for row in flag_rows() if row.key and not row.value)
    assert {key for key, count in keys.items() if count > 1} == {"train.train_only"}


def test_every_core_option_has_a_row_that_is_available_and_the_other_way_round() -> None:
    rows = [row for row in known_keys().values() if row.available]
    listed = {row.key for row in rows if row.key.count(".") == 1}
    listed |= {row.key for row in rows if row.key in core_keys()}
    assert listed == core_keys()


def test_no_key_is_both_a_flag_and_an_extra() -> None:
    flags = {row.key for row in flag_rows() if not row.value}
    assert not flags & {row.key for row in extra_rows()}


def test_owners_of_available_options_exist() -> None:
    ours = {CORE, *known_plugins().values()}
    assert {row.owner for row in (*flag_rows(), *extra_rows()) if row.available} <= ours


def test_available_options_of_components_are_in_their_models(catalog: Catalog) -> None:
    for row in known_keys().values():
        if not row.available or row.key.count(".") == 1 or row.key in core_keys():
            continue
        section, name, key = row.key.split(".")
        kinds = [k.name for k in KINDS if k.section == section and name in catalog.names(k.name)]
        model = catalog.options_model(kinds[0], name)
        assert model is not None
        assert key in model.model_fields, row.key
        assert catalog.find(kinds[0], name).distribution == row.owner


def test_options_not_available_are_in_no_installed_model(catalog: Catalog) -> None:
    for kind in KINDS:
        for name in catalog.names(kind.name):
            model = catalog.options_model(kind.name, name)
            keys = (
                {f"{kind.section}.{name}.{key}" for key in model.model_fields} if model else set()
            )
            assert not keys & {row.key for row in MISSING}


@pytest.mark.parametrize("row", [*MISSING, *MISSING_EXTRA], ids=lambda row: row.key)
def test_a_known_option_that_is_not_available_is_refused_by_name(
    problems: Problems, row: Known
) -> None:
    found = problems({row.key: value_of(row)})
    (path,) = found
    assert path == row.key or path.startswith(f"{row.key}.")
    assert "known option, not available in drl 0.1" in found[path]
    assert row.owner in found[path]


BESIDE = {
    "train.micro_batch_size_sample": {"train.micro_batch_size_tstep": 1},
    "train.micro_batch_size_tstep": {"train.micro_batch_size_sample": 1},
    "reward.custom": {"reward.type": None},
}
"""Options that come together."""

ELSEWHERE = {
    "sampling.fps": "of video families, test_rollout_rules.py",
    "sampling.guidance_scale_2": "of families with two experts, test_rollout_rules.py",
    **dict.fromkeys(SERVED_ONLY, "of engines that are served, test_served_rules.py"),
    "eval.config": "its sets become eval.datasets, test_evaluation_file.py",
}
"""Options that the recipe of these tests cannot show."""

UNSET = {
    "algorithm.nft.adaptive_weight": False,
    "algorithm.nft.beta": 0.1,
    "algorithm.nft.shuffle_timesteps": False,
    "algorithm.nft.timestep_fraction": 1.0,
    "algorithm.sft_loss.flow_shift": 3.0,
    "optimizer.lr_warmup_fraction": 0.5,
    "optimizer.lr_wsd_decay_iters": 2,
    "optimizer.lr_wsd_decay_style": "cosine",
    "sampling.flow_shift": 3.0,
    "sampling.true_cfg_scale": 2.0,
    "sampling.negative_prompt": "",
    "sde.sde_window.range": [0, 10],
    "sde.epoch_global_random_choice.candidate_steps": [1, 2],
    "eval.interval": 0,
    "eval.reward_key": "bytes",
    "reward.key": "bytes",
    "rollout.over_sampling_batch_size": 4,
    "train.micro_batch_size_sample": 4,
    "train.micro_batch_size_tstep": 1,
    "train.num_epoch": 1,
    "train.start_rollout_id": 0,
    "train.env": {"ACME_MODE": "quick"},
    "train.attention_backend": "native",
    "train.parameter_dtypes": [["*.norm.*", "fp32"]],
    "cluster.offload_train": False,
    "cluster.offload_rollout": False,
    "data.sft_encoder_checkpoint": "acme/encoders",
    "debug.save_rollout_data": "dumps/{rollout_id}",
    "debug.load_rollout_data": "recorded-{rollout_id}",
    "debug.load_rollout_subsample": 0.5,
    "debug.save_train_data": "dumps/{rollout_id}-{rank}",
    "debug.dump_details": "dumps",
    "debug.ci.metric_key": "eval/heldout",
    "debug.ci.metric_threshold": 0.5,
    "lora.target_modules": ["to_q"],
    "lora.adapter_path": "adapter",
    "checkpoint.save": "kept",
    "checkpoint.save_interval": 5,
    "checkpoint.keep_last": 3,
    "checkpoint.best_metric": "eval/heldout",
    "checkpoint.load": ".",
    "checkpoint.step": 1,
    "reward.ocr.num_workers": 4,
    "model.pipeline_config": "drl.interfaces.family:Family",
    "sde.backend": "dance",
    # a function that its source defines more than once is looked at when the run starts
    **{slot.option: "functools:reduce" for slot in SLOTS},
}
"""Something to write for options whose default is to be unset, or whose component is not chosen."""


def test_every_available_option_is_taken_at_its_default(load: Callable[..., Any]) -> None:
    resolved = load().resolved()
    for row in (row for row in PRESENT if row.key not in ELSEWHERE):
        section, *rest = row.key.split(".")
        value = resolved[section]
        for key in rest:
            value = value.get(key, {}) if isinstance(value, dict) else value
        if value == {}:
            value = UNSET[row.key]
        assert load({**BESIDE.get(row.key, {}), row.key: value}).origins[row.key] == "recipe.toml"


def test_every_refused_option_is_refused_in_each_layer(
    problems: Problems, folder: Path, base: str
) -> None:
    rows = [row for row in MISSING if not row.key.startswith("rollout.sglang.args")]
    text = tomli_w.dumps(nested((row.key, False) for row in rows))
    wanted = {row.key for row in rows}
    override = folder / "override.toml"
    override.write_text(text)
    assert set(problems(override=override)) == wanted
    assert set(problems(sets=[f"{row.key}=false" for row in rows])) == wanted
    (folder / "more.toml").write_text(text)
    assert set(problems(text=f'include.files = ["more.toml"]\n{base}')) == wanted


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("algorithm.clip_range", "algorithm.policy_loss.clip_range"),
        ("algorithm.globalize_std", "algorithm.grpo.globalize_std"),
        ("sde.window_range", "sde.sde_window.range"),
        ("train.flow_shift", "algorithm.sft_loss.flow_shift"),
        ("sde.candidate_steps", "sde.epoch_global_random_choice.candidate_steps"),
    ],
)
def test_an_option_that_moved_says_where_it_is(problems: Problems, former: str, now: str) -> None:
    assert problems({former: 1}) == {former: f"is an option of its plugin: write {now}"}


def test_every_moved_option_is_answered(problems: Problems) -> None:
    for former, row in moved_keys().items():
        (message,) = problems({former: False}).values()
        assert row.key in message or "not available" in message


def test_a_logger_flag_says_that_it_is_a_word_in_a_list(problems: Problems) -> None:
    found = problems({"logging.wandb.enabled": True})["logging.wandb.enabled"]
    assert 'write logging.loggers = ["wandb", ...]' in found
    assert "drl-logger-wandb" in found


def test_names_of_core_options_are_known_without_models() -> None:
    assert {"loss", "kl_beta", "custom_loss"} <= core_options("algorithm")
    assert "policy_loss" not in core_options("algorithm")
