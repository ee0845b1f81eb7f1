"""The trained components on the meta device: rows, dtypes, shares, and families that do not play along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import write_recipe
from torch import nn

from drl.api import Context, ContractError, WeightSource
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.lora.tree import lora_layers
from drl.mathematics.checksum import FINGERPRINT_BYTES
from drl.plan.anatomy import Anatomy, NoPlan, blank, compared, on_meta, recompute, size_of
from drl.plan.ledger import training_footprint
from drl.plan.predict import Card, Prediction, engine_outline, predict, this_card
from drl.trainers import Maker
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.family import Sd3Family

CATALOG = Catalog.load()


@pytest.fixture(autouse=True)
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRL_RATES", str(tmp_path / "rates.json"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("anatomy"), checkpoint)


def loaded(file: Path, *sets: str) -> Any:
    return load_recipe(file, sets=("cluster.device=cuda", *sets), catalog=CATALOG)


def anatomy(file: Path, *sets: str, family: Any = None) -> Anatomy:
    family = family or Sd3Family(Sd3Options(), Context())
    return Anatomy(loaded(file, *sets), family, Context())


@pytest.fixture(scope="module")
def tiny(file: Path) -> Anatomy:
    """Shared: what was measured stays."""
    return anatomy(file)


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_training_is_linear_in_its_rows(tiny: Anatomy, rows: int, share: float) -> None:
    straight, measured = tiny.training(share).at(rows), tiny._train("transformer", rows, share)
    # of tensors this small the rounding to whole allocations is a few percent
    assert straight.kept == pytest.approx(measured.kept, rel=0.03)
    assert straight.peak == pytest.approx(measured.peak, rel=0.03)
    assert straight.forward_flops == measured.forward_flops
    assert straight.backward_flops == measured.backward_flops


@pytest.mark.parametrize("rows", [3, 8])
def test_forwards_are_linear_in_their_rows(tiny: Anatomy, rows: int) -> None:
    straight, measured = tiny.inference.at(rows), tiny._infer("transformer", rows)
    assert straight.peak == pytest.approx(measured.peak, rel=0.01)
    assert straight.forward_flops == measured.forward_flops


def test_rows_are_measured_when_they_are_asked_for(file: Path) -> None:
    fresh = anatomy(file)
    rows = fresh.training(0.0)
    assert "one" not in vars(rows)
    assert rows.at(1) is rows.one
    assert "two" not in vars(rows)
    assert fresh.training(0.0) is rows


def test_nothing_is_read_and_nothing_takes_memory(tiny: Anatomy) -> None:
    module = tiny.modules["transformer"]
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {b.device.type for b in module.buffers()} == {"meta"}
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("sets", "frozen", "trained"),
    [
        ((), torch.bfloat16, torch.float32),
        (("train.forward_dtype=fp32",), torch.float32, torch.float32),
        (("train.master_dtype=bf16",), torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes_are_the_trainers(
    file: Path, sets: tuple[str, ...], frozen: torch.dtype, trained: torch.dtype
) -> None:
    found = anatomy(file, *sets)
    parameters = list(found.modules["transformer"].parameters())
    assert {p.dtype for p in parameters if not p.requires_grad} == {frozen}
    assert {p.dtype for p in parameters if p.requires_grad} == {trained}
    assert found.bytes.frozen == frozen.itemsize * found.bytes.elements
    assert found.bytes.trained == trained.itemsize * found.bytes.trained_elements


def test_full_training_keeps_masters(file: Path) -> None:
    found = anatomy(file, "lora.enabled=false", "train.forward_dtype=bf16")
    assert found.bytes.frozen == found.bytes.adapted == 0
    assert found.bytes.trained == 4 * found.bytes.elements


def test_adapted_elements_are_those_of_the_layers(tiny: Anatomy) -> None:
    layers = lora_layers(tiny.modules["transformer"]).values()
    assert tiny.bytes.adapted == sum(layer.weight.numel() for layer in layers)
    assert tiny.bytes.trained_elements == sum(4 * sum(layer.weight.shape) for layer in layers)


def test_a_module_with_a_dtype_of_its_own_keeps_it(file: Path) -> None:
    own = anatomy(file, 'train.parameter_dtypes=[["*norm_out.linear.*", "fp32"]]')
    layer = own.modules["transformer"].get_submodule("norm_out.linear")
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    more = own.bytes.frozen - anatomy(file).bytes.frozen
    assert more == 2 * sum(p.numel() for p in layer.parameters())


def test_gradients_are_counted_beside_the_peak(file: Path) -> None:
    """Full training of a small model: the gradients are as large as the weights."""
    found = anatomy(file, "lora.enabled=false", "train.forward_dtype=fp32")
    forward = found.forward("transformer", 1)
    whole = training_footprint(lambda: list(forward().values()), torch.float32)
    assert whole.peak > found.bytes.trained
    assert found.training(0.0).one.peak <= whole.peak - found.bytes.trained + 2**20


def test_shapes_and_bytes_of_rows(tiny: Anatomy) -> None:
    outline = tiny.outline
    (shape,) = outline.streams.values()
    assert tiny.row_bytes == 4 * torch.empty(shape).numel()
    assert tiny.condition_bytes == size_of([on_meta(s) for s in outline.condition.values()])


def test_the_share_of_blocks_is_recomputed_and_turned_off_again(tiny: Anatomy) -> None:
    work = [tiny.training(share).one.backward_flops for share in (0.0, 0.5, 1.0)]
    assert work[0] < work[1] < work[2]
    assert tiny._train("transformer", 1, 0.0).backward_flops == work[0]


def test_a_model_that_is_none_of_diffusers_is_left_as_it_is() -> None:
    module = nn.Linear(2, 2)
    recompute(module, 1.0, ("Linear",))
    assert module(torch.zeros(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 20), 4 * 4 * 30),
        ((FINGERPRINT_BYTES, 10), 4 * FINGERPRINT_BYTES),
        ((FINGERPRINT_BYTES // 4,) * 8, 4 * FINGERPRINT_BYTES),
    ],
)
def test_a_comparison_takes_what_a_piece_does_or_all_where_that_is_less(
    sizes: tuple[int, ...], expected: int
) -> None:
    assert compared([torch.empty(size, device="meta") for size in sizes]) == expected


class Silent(Sd3Family):
    """A family that gives no outline."""

    def outline(self, checkpoint, sampling):
        return None


class Eager(Sd3Family):
    """A family that always loads."""

    def build(self, component, source):
        return super().build(component, WeightSource(checkpoint=source.checkpoint))


def test_a_family_without_an_outline_is_named(file: Path) -> None:
    with pytest.raises(NoPlan, match=r"Silent gives no outline of its samples \(Family.outline\)"):
        anatomy(file, family=Silent(Sd3Options(), Context()))


def test_a_family_that_loads_weights_is_named(file: Path) -> None:
    family = Eager(Sd3Options(), Context())
    with pytest.raises(ContractError, match=r"transformer: Family.build must respect"):
        blank(loaded(file), family, Context(), "transformer", 0)


def test_a_recipe_that_replays_has_no_engine(file: Path) -> None:
    recipe = loaded(file)
    make = Maker(recipe, CATALOG, Context())
    found = engine_outline(make, recipe)
    assert found is not None
    assert found.rows == 4
    supervised = loaded(file, "train.train_only=true", "algorithm.loss=sft_loss")
    assert engine_outline(Maker(supervised, CATALOG, Context()), supervised) is None


def test_this_machine_without_a_gpu_is_a_cpu() -> None:
    assert this_card("cpu") == Card(name="CPU")
    if not torch.cuda.is_available():
        assert this_card("cuda").memory is None


def test_changing_a_scenario_measures_nothing_again(file: Path) -> None:
    found: Prediction = predict(loaded(file), CATALOG, Card(name="Card", memory=2**30))
    before = found.largest.peak
    other = found.instead(rows=1, micro_batches=16)
    assert other.anatomy is found.anatomy
    assert other.largest.peak <= before
    assert found.largest.peak == before
    assert other.work.training == found.work.training


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_more_ranks_share_the_work_of_training(file: Path, gpus: int) -> None:
    found = predict(
        loaded(file, f"cluster.actor_num_gpus_per_node={gpus}"), CATALOG, Card(name="Card")
    )
    assert found.scenario.rank_pairs == 16 // gpus
    assert found.work.micro_batches == 4 // gpus
    assert found.work.pairs == 16
    assert found.scenario.own_weights == ("shared" if gpus == 1 else "fp32")


def test_full_weights_are_spread_over_the_ranks_of_a_copy(file: Path) -> None:
    sets = ("lora.enabled=false", "cluster.actor_num_gpus_per_node=4")
    spread = predict(loaded(file, *sets), CATALOG, Card(name="Card")).scenario.shards
    copies = (*sets, "train.dp_replicate_size=2")
    assert (spread, predict(loaded(file, *copies), CATALOG, Card(name="Card")).scenario.shards) == (
        4,
        2,
    )
