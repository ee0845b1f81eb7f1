"""Values that follow from the machine or from other options."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from drl.config import Recipe, load_recipe
from drl.config.machine import Machine, detect

Load = Callable[..., Recipe]


def test_a_machine_without_gpu_computes_in_fp32_on_the_cpu(load: Load) -> None:
    recipe = load(cuda=False)
    assert recipe.cluster.device == "cpu"
    assert recipe.train.forward_dtype == "fp32"
    assert recipe.sampling.generator_device == "cpu"
    assert recipe.trust.max_log_prob_diff == 1e-5
    for path in ("cluster.device", "train.forward_dtype", "sampling.generator_device"):
        assert recipe.origins[path] == "auto"


def test_a_machine_with_gpu_keeps_the_defaults(load: Load) -> None:
    recipe = load(cuda=True)
    assert recipe.cluster.device == "cuda"
    assert recipe.train.forward_dtype == "bf16"
    assert recipe.sampling.generator_device == "cuda"
    assert recipe.trust.max_log_prob_diff == 2e-3
    assert recipe.origins["train.forward_dtype"] == "default"


def test_the_cpu_of_a_gpu_machine_is_a_cpu(load: Load) -> None:
    recipe = load({"cluster.device": "cpu"}, cuda=True)
    assert recipe.train.forward_dtype == "fp32"
    assert recipe.sampling.generator_device == "cpu"


def test_explicit_values_are_never_changed(load: Load) -> None:
    changes = {
        "train.forward_dtype": "bf16",
        "sampling.generator_device": "cuda",
        "cluster.device": "cuda:1",
        "trust.max_log_prob_diff": 0.5,
    }
    recipe = load(changes, cuda=False)
    assert recipe.train.forward_dtype == "bf16"
    assert recipe.sampling.generator_device == "cuda"
    assert recipe.cluster.device == "cuda:1"
    assert recipe.trust.max_log_prob_diff == 0.5


def test_a_gpu_that_is_asked_for_and_not_visible_is_a_warning(load: Load) -> None:
    recipe = load({"cluster.device": "cuda:1"}, cuda=False)
    assert [(w.path, w.message) for w in recipe.warnings] == [
        ("cluster.device", "is 'cuda:1', but no GPU is visible here"),
    ]
    asked = load({"sampling.generator_device": "cuda"}, cuda=False).warnings
    assert [w.path for w in asked] == ["sampling.generator_device"]
    assert load({"cluster.device": "cuda:1"}, cuda=True).warnings == ()


def test_an_explicit_auto_is_resolved(load: Load) -> None:
    recipe = load({"cluster.device": "auto"})
    assert recipe.cluster.device == "cpu"
    assert recipe.origins["cluster.device"] == "auto"


def test_the_rollout_follows_the_run_seed_and_evaluation_does_not(load: Load) -> None:
    recipe = load(sets=["train.seed=7"])
    assert (recipe.rollout.seed, recipe.eval.seed) == (7, 42)
    assert recipe.origins["rollout.seed"] == "auto"
    assert load(sets=["train.seed=7", "rollout.seed=8"]).rollout.seed == 8


@pytest.mark.parametrize(
    ("per_step", "steps", "resolved"),
    [
        (None, None, (16, 1)),
        (8, None, (8, 2)),
        (None, 4, (4, 4)),
        (4, 4, (4, 4)),
        (16, None, (16, 1)),
    ],
)
def test_batch_knobs_derive_each_other(
    load: Load, per_step: int | None, steps: int | None, resolved: tuple[int, int]
) -> None:
    recipe = load({"train.global_batch_size": per_step, "train.num_steps_per_rollout": steps})
    assert (recipe.train.global_batch_size, recipe.train.num_steps_per_rollout) == resolved


def test_the_schedule_ends_with_the_run(load: Load) -> None:
    assert load().optimizer.lr_decay_iters == 4 * 2
    assert load({"optimizer.lr_decay_iters": 5}).optimizer.lr_decay_iters == 5


def test_the_reference_follows_the_kl_term(load: Load) -> None:
    assert load().algorithm.ref_mode == "none"
    assert load({"algorithm.kl_beta": 0.1}).algorithm.ref_mode == "lora_base"


def test_a_loss_that_compares_with_a_reference_gets_the_one_that_is_there(load: Load) -> None:
    recorded = {"train.train_only": True, "data.source": "preferences", "algorithm.loss": "dpo"}
    average = {"ema.enabled": True, "lora": None}
    assert load(recorded).algorithm.ref_mode == "lora_base"
    assert load(recorded | average).algorithm.ref_mode == "ema"
    explicit = {"ema.enabled": True, "algorithm.ref_mode": "ema"}
    assert load(recorded | explicit).origins["algorithm.ref_mode"] == "recipe.toml"


def test_evaluation_follows_sampling_and_data(load: Load) -> None:
    recipe = load({"sampling.num_steps": 7, "data.input_key": "input"})
    assert (recipe.eval.num_steps, recipe.eval.input_key) == (7, "input")
    assert load({"eval.num_steps": 3}).eval.num_steps == 3


def test_cps_drops_the_constants_of_the_log_probability(load: Load) -> None:
    recipe = load({"sde.type": "cps"})
    assert recipe.sde.log_prob_no_const is True
    assert recipe.origins["sde.log_prob_no_const"] == "auto"
    assert load().sde.log_prob_no_const is False


@pytest.mark.parametrize(
    ("file", "name"), [("my recipe (2).toml", "my-recipe-2"), ("...toml", "run"), ("é.toml", "run")]
)
def test_a_run_is_called_like_its_recipe(
    load: Load, folder: Path, base: str, file: str, name: str
) -> None:
    (folder / file).write_text(base)
    recipe = load_recipe(folder / file, catalog=load().catalog, machine=Machine())
    assert recipe.run.name == name


def test_invisible_devices_mean_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect() == Machine(cuda=False)


def test_a_torch_for_cpus_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if version("torch").endswith("+cpu"):
        assert detect() == Machine(cuda=False)
