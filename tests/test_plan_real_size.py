"""The plan of a model of real size, against what an H200 held and took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blank_pipeline import write_blank
from e2e import RECIPE, write_recipe
from gpu.pipelines import MEDIUM

from drl.api import RowShape
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.lora.work import adapter_flops
from drl.plan.predict import Card, Prediction, predict

H200 = Card(name="NVIDIA H200", memory=140 * 2**30, torch="2.11.0")
GIB = 2**30


@pytest.fixture(autouse=True)
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured on this machine: the rates that ship count."""
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of Stable Diffusion 3.5 Medium's size, of configs alone."""
    folder = tmp_path_factory.mktemp("medium")
    blank = write_blank(folder / "pipeline", MEDIUM)
    text = RECIPE.replace("rank = 4\nalpha = 8", "rank = 32\nalpha = 64").replace(
        "width = 32\nheight = 32", "width = 512\nheight = 512"
    )
    return write_recipe(folder, blank, text)


CARD_SETS = ("cluster.device=cuda", "sampling.num_steps=10", "rollout.local.rows=8")


def planned(catalog: Catalog, recipe: Path, *sets: str) -> Prediction:
    return predict(load_recipe(recipe, sets=sets, catalog=catalog), catalog, H200)


@pytest.fixture(scope="module")
def real_size(medium: Path) -> Prediction:
    """Shared by tests: what was measured of the model is kept in it."""
    return planned(Catalog.load(), medium, *CARD_SETS, "train.micro_batch_size=16")


def test_the_work_is_what_the_family_says_of_its_model(real_size: Prediction, medium: Path) -> None:
    anatomy, family = real_size.anatomy, real_size.anatomy.family
    folder = str(medium.parent / "pipeline")
    config = family.component_config("transformer", folder)
    outline = anatomy.outline
    shape = RowShape(latent=outline.streams["visual"], text_tokens=outline.text_tokens)
    assert (shape.latent, shape.text_tokens) == ((16, 64, 64), 77 + 256)
    flops = family.flops("transformer", config, shape)
    assert flops is not None
    assert anatomy.inference.one.forward_flops == pytest.approx(flops.forward, rel=1e-3)

    def rows_of(layer: str) -> int:
        rows = family.layer_rows("transformer", config, shape, layer)
        assert rows is not None
        return rows

    adapters = adapter_flops(anatomy.modules["transformer"], rows_of)
    trained = anatomy.training(0.0).one
    expected = flops.training(frozen=True) + 3 * adapters
    assert trained.forward_flops + trained.backward_flops == pytest.approx(expected, rel=5e-3)
    assert flops.forward == pytest.approx(2.44e12, rel=2e-3)  # as counted on the GPU


EAGER = {4: 15.2 - 5.38, 8: 25.0 - 5.38, 16: 44.7 - 5.38}
RECOMPUTED = {4: 6.2 - 5.38, 8: 7.1 - 5.38, 16: 8.7 - 5.38}
FORWARD = {8: 0.43, 16: 0.83}
"""GiB that an H200 held beyond what lay there before, by rows, in eager mode: docs/measurements.md."""


@pytest.mark.parametrize(("rows", "measured"), EAGER.items())
def test_memory_of_training_is_what_a_gpu_held(
    real_size: Prediction, rows: int, measured: float
) -> None:
    found = real_size.anatomy.training(0.0).at(rows)
    assert found.peak / GIB == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "measured"), RECOMPUTED.items())
def test_memory_of_recomputed_training_is_what_a_gpu_held(
    real_size: Prediction, rows: int, measured: float
) -> None:
    found = real_size.anatomy.training(1.0).at(rows)
    assert found.peak / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "measured"), FORWARD.items())
def test_memory_of_a_forward_is_what_a_gpu_held(
    real_size: Prediction, rows: int, measured: float
) -> None:
    assert real_size.anatomy.inference.at(rows).peak / GIB == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    ("changes", "milliseconds"),
    [
        ({"compiled": True}, 220),
        ({"compiled": False}, 430),
        ({"compiled": True, "checkpointed": 1.0}, 287),
        ({"compiled": False, "checkpointed": 1.0}, 612),
    ],
)
def test_seconds_of_a_micro_batch_are_what_a_gpu_took(
    real_size: Prediction, changes: dict[str, Any], milliseconds: float
) -> None:
    found = real_size.instead(**changes)
    assert found.seconds is not None
    each = found.seconds["train"] / found.work.micro_batches
    assert 1e3 * each == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(("compiled", "peak"), [(False, 44.7 - 5.38), (True, 29.9 - 4.55)])
def test_a_compiled_micro_batch_keeps_less(
    real_size: Prediction, compiled: bool, peak: float
) -> None:
    train = real_size.instead(compiled=compiled).phases[1]
    assert train.activations / GIB == pytest.approx(peak, rel=0.03)


WHOLE = {
    "sampling.guidance_scale": 4.5,
    "rollout.batch_size": 8,
    "rollout.n_samples_per_prompt": 8,
    "rollout.microgroup_size": 8,
    "rollout.local.compile": "true",
    "train.compile": "true",
    "train.micro_batch_size": 16,
    "model.sd3.vae_dtype": "bf16",
    "model.sd3.compile_vae": "true",
    "model.sd3.text_dtype": "bf16",
}
SECONDS = {"rollout": 7.30, "train": 3.43, "update_weights": 0.884}
PEAKS = {"rollout": 9.72, "train": 56.7}
"""Seconds and GiB of a whole iteration on an H200 by phase: docs/measurements.md."""


@pytest.mark.slow
def test_a_whole_iteration_is_what_a_gpu_took_and_held(medium: Path) -> None:
    sets = [f"{name}={value}" for name, value in WHOLE.items()]
    found = planned(Catalog.load(), medium, *CARD_SETS, *sets)
    assert found.work.pairs == 128
    assert found.seconds is not None
    assert {name: found.seconds[name] for name in SECONDS} == pytest.approx(SECONDS, rel=0.1)
    held = {name: found.peak_bytes[name] / GIB for name in PEAKS}
    assert held == pytest.approx(PEAKS, rel=0.1)


def test_parameters_and_parts_are_counted_exactly(real_size: Prediction) -> None:
    held = real_size.anatomy.bytes
    assert held.elements == 2_243_171_520
    assert held.frozen == 2 * held.elements
    assert (
        held.trained_elements == 192 * 32 * 2 * 1536 - 32 * 2 * 1536
    )  # the last block has no to_add_out
    assert held.trained == 4 * held.trained_elements
    assert held.buffers == 4 * 384 * 384 * 1536
    assert {part.name for part in real_size.anatomy.outline.parts} == {
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "vae",
    }
