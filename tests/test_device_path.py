"""Options of the trainer's and engine's forward through whole runs: each is read, none goes in silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import metric_rows, run_here, same, trained_weights, write_recipe

from drl.assemble import engine_dtypes
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import BadInput
from drl.model.build import build_components
from drl.model.compiled import Compilations
from drl.model.precision import OwnDtype
from drl.trainers import rank_context, rank_settings

Drl = Callable[..., tuple[int, str, str]]
ONE = ("train.num_rollout=1", "checkpoint.save_interval=1", "eval.datasets=[]")
BF16 = "train.forward_dtype=bf16"
NORMS = 'train.parameter_dtypes=[["*.norm1.linear.*", "fp32"]]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    root = tmp_path_factory.mktemp("device_path")
    write_recipe(root, checkpoint)
    return root


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[..., Path]:
    """Run one iteration with these settings, once each; gives the run directory."""
    known: dict[tuple[str, ...], Path] = {}

    def once(*sets: str) -> Path:
        if sets not in known:
            known[sets] = folder / f"run-{len(known)}"
            run_here(folder / "tiny.toml", known[sets], *ONE, *sets)
        return known[sets]

    return once


def built(folder: Path, *sets: str) -> Any:
    """The one component of the recipe as its trainer has it."""
    catalog = Catalog.load()
    recipe: Any = load_recipe(folder / "tiny.toml", sets=sets, catalog=catalog)
    context = rank_context(recipe, None, rank_settings(recipe), 0)
    family = catalog.create("family", recipe.model.family, recipe.options("family", "sd3"), context)
    return build_components(recipe, family, context)["transformer"]


@pytest.mark.parametrize(
    "sets",
    [
        ("model.gradient_checkpointing=true",),
        ("model.gradient_checkpointing=true", "model.checkpointed_share=0.5"),
    ],
)
def test_recomputed_blocks_train_to_the_same_bits(
    run: Callable[..., Path], folder: Path, sets: tuple[str, ...]
) -> None:
    assert same(trained_weights(run(*sets), 1), trained_weights(run(), 1))
    model = built(folder, *sets).module
    assert model.gradient_checkpointing
    # a share of two blocks is one: the other's activations are kept
    calls: list[int] = []
    for number, block in enumerate(model.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    wide = model.config.joint_attention_dim, model.config.pooled_projection_dim
    latents = torch.randn(1, model.config.in_channels, 4, 4)
    output = model(latents, torch.randn(1, 5, wide[0]), torch.randn(1, wide[1]), torch.ones(1))
    output.sample.sum().backward()
    assert sorted(calls) == ([0, 0, 1] if len(sets) == 2 else [0, 0, 1, 1])


def test_a_kernel_is_asked_for_on_both_sides_and_they_agree(run: Callable[..., Path]) -> None:
    math = run("train.attention_backend=_native_math")
    (row,) = metric_rows(math)
    assert row["trust/parity_worst"] == 0.0
    weights = trained_weights(math, 1)
    assert not same(weights, trained_weights(run(), 1)), "another kernel has other last bits"
    for key, right in trained_weights(run(), 1).items():
        torch.testing.assert_close(weights[key], right, rtol=0.05, atol=2e-3)


def test_the_base_of_adapters_is_bf16_and_masters_are_float32(folder: Path) -> None:
    model = built(folder, BF16).module
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == wanted, name
    assert {p.dtype for p in built(folder).module.parameters()} == {torch.float32}
    full = built(folder, BF16, "lora.enabled=false").module
    assert {p.dtype for p in full.parameters()} == {torch.float32}, (
        "what is trained has its masters"
    )


def test_a_dtype_of_single_modules_reaches_trainer_and_engine(
    run: Callable[..., Path], folder: Path
) -> None:
    component = built(folder, BF16, NORMS)
    layer = component.module.transformer_blocks[0].norm1.linear
    assert isinstance(layer, OwnDtype)
    assert layer.weight.dtype == torch.float32
    (plain,), (own,) = metric_rows(run(BF16)), metric_rows(run(BF16, NORMS))
    # the engine computes otherwise too, and exactly as the trainer does
    assert plain["rollout/reward/raw_mean"] != own["rollout/reward/raw_mean"]
    assert own["trust/parity_worst"] == plain["trust/parity_worst"] == 0.0


def test_compiled_blocks_are_counted_and_train_alike(
    folder: Path, tmp_path: Path, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the tracer of a real run, without the minutes that its compiler takes on a CPU
    monkeypatch.setattr("drl.trainers.Compilations", partial(Compilations, backend="eager"))
    run_here(
        folder / "tiny.toml",
        tmp_path / "run",
        "train.compile=true",
        "checkpoint.save_interval=2",
        "eval.datasets=[]",
    )
    first, second = metric_rows(tmp_path / "run")
    assert first["trust/parity_worst"] < 1e-5
    assert first["train/compiled_graphs"] > 0
    assert second["train/compiled_graphs"] == 0, "fixed shapes compile in the first iteration"
    assert first["train/recompilations"] == second["train/recompilations"] == 0
    (plain,) = metric_rows(run())
    assert "train/compiled_graphs" not in plain
    assert first["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("train.attention_backend=nativ",), "did you mean 'native'?"),
        (("train.attention_backend=_native_cudnn",), "cannot be used here"),
        (('train.parameter_dtypes=[["*.norm9.*","bf16"]]',), "matches no parameter of transformer"),
        (('train.parameter_dtypes=[["*.norm1.linear.weight","bf16"]]',), "of different dtypes"),
    ],
)
def test_what_cannot_be_is_refused_without_a_traceback(
    folder: Path, tmp_path: Path, drl: Drl, sets: tuple[str, ...], told: str
) -> None:
    words = [word for one in sets for word in ("--set", one)]
    code, _, err = drl("run", str(folder / "tiny.toml"), "--run-dir", str(tmp_path / "run"), *words)
    assert code == 2
    assert told in err
    assert "Traceback" not in err


def test_an_unknown_kernel_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("weights were read first")

    monkeypatch.setattr(import_module("drl_family_sd3.family").Sd3Family, "build", build)
    with pytest.raises(BadInput, match="no attention backend 'sdpa'"):
        built(folder, "train.attention_backend=sdpa")


def test_globs_of_the_recipe_come_after_the_family_s_for_engines_too(folder: Path) -> None:
    from types import SimpleNamespace

    catalog = Catalog.load()
    recipe: Any = load_recipe(folder / "tiny.toml", sets=(NORMS,), catalog=catalog)
    family = SimpleNamespace(
        component_config=lambda *_: {},
        pipeline_config=lambda *_: SimpleNamespace(
            parameter_dtypes={"*.norm1.linear.*": "fp16", "*.norm2.*": "fp32"}
        ),
    )
    run = SimpleNamespace(recipe=recipe, family=family)
    assert list(engine_dtypes(run)["transformer"].items()) == [
        ("*.norm2.*", "fp32"),
        ("*.norm1.linear.*", "fp32"),
    ]
    plain: Any = load_recipe(folder / "tiny.toml", catalog=catalog)
    family.pipeline_config = lambda *_: SimpleNamespace(parameter_dtypes={})
    assert engine_dtypes(SimpleNamespace(recipe=plain, family=family)) == {}
