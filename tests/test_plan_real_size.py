"""The plan of a model of real size, against what an H200 held and took."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import one_gpu  # noqa: E402

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
DECODED = ((4, "fp32", 4.007), (8, "fp32", 8.002), (4, "bf16", 2.001), (8, "bf16", 4.001))
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


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "dtype", "measured"), DECODED)
def test_memory_of_decoding_is_what_a_gpu_held(
    medium: Path, rows: int, dtype: str, measured: float
) -> None:
    sets = (f"model.sd3.decode_rows={rows}", f"model.sd3.vae_dtype={dtype}")
    found = planned(Catalog.load(), medium, *CARD_SETS, *sets)
    assert found.anatomy.decoding.peak / GIB == pytest.approx(measured, rel=0.05)


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


@dataclass(frozen=True)
class Measured:
    """What a run of benchmarks/one_gpu.py took and held on an H200, by phase: docs/measurements.md."""

    case: str
    sets: tuple[str, ...]
    seconds: Mapping[str, float]
    gib: Mapping[str, float]

    @property
    def name(self) -> str:
        """The case, and what is varied."""
        return "-".join((self.case, *self.sets))


def run(case: str, *figures: Sequence[float], sets: tuple[str, ...] = ()) -> Measured:
    phases = ("rollout", "train", "update_weights")
    seconds, gib = (dict(zip(phases, one, strict=False)) for one in figures)
    return Measured(case, sets, seconds, gib)


EAGER_SETS = tuple(
    f"{part}=false" for part in ("train.compile", "rollout.local.compile", "model.sd3.compile_vae")
)
# no seconds of pushes that were run before they took 0.1 s
RUNS = (
    run("iteration", (7.30, 3.43), (9.72, 56.7), sets=("rollout.local.adapters=merged",)),
    run("24gb", (7.24, 5.90, 0.0936), (8.09, 9.30, 7.50)),
    run("80gb", (15.5, 47.9), (9.51, 31.5, 6.79)),
    run("nft-24gb", (3.97, 13.5), (8.10, 9.29, 7.50)),
    run("nft-80gb", (3.92, 11.1), (9.70, 32.1, 7.58)),
    run("growth", (1.10, 0.453, 0.107), (8.83, 30.8, 6.40), sets=("rollout.batch_size=2",)),
    run("growth", (4.22, 1.78, 0.0996), (9.06, 31.0, 6.62), sets=("rollout.batch_size=8",)),
    run("growth", (16.7, 7.03, 0.0938), (9.86, 31.8, 7.42), sets=("rollout.batch_size=32",)),
    run(
        "growth",
        (2.24, 0.882, 0.101),
        (9.83, 45.1, 6.39),
        sets=("rollout.batch_size=2", *EAGER_SETS),
    ),
    run(
        "24gb",
        (3.59, 3.14, 0.108),
        (8.52, 9.83, 7.43),
        sets=("rollout.batch_size=2", "train.global_batch_size=16", *EAGER_SETS),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("measured", RUNS, ids=lambda measured: measured.name)
def test_a_whole_iteration_is_what_a_gpu_took_and_held(
    catalog: Catalog, tmp_path: Path, measured: Measured
) -> None:
    case = one_gpu.CASES[measured.case]
    checkpoint = write_blank(tmp_path / "pipeline", MEDIUM)
    sets = (f"model.checkpoint={checkpoint}", "cluster.device=cuda", "reward.type=jpeg")
    found = planned(catalog, one_gpu.SD3 / case.recipe, *sets, *case.sets, *measured.sets)
    assert found.seconds is not None
    seconds = {name: found.seconds[name] for name in measured.seconds}
    assert seconds == pytest.approx(measured.seconds, rel=0.15)
    held = {name: found.peak_bytes[name] / GIB for name in measured.gib}
    assert held == pytest.approx(measured.gib, rel=0.15)


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
