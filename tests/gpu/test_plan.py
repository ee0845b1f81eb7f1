"""The plan's memory against what a GPU's allocator really hands out, and a real card that is full."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from blank_pipeline import write_blank
from diffusers import AutoencoderKL, SD3Transformer2DModel
from e2e import RECIPE, run_here, write_recipe
from gpu.facts import record
from gpu.pipelines import MEDIUM
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from drl.api import ConditionRecord, Conditions, Guidance, Streams
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import OutOfMemory
from drl.mathematics.checksum import tensors_fingerprint
from drl.model.build import adapt
from drl.model.compiled import Compilations, compile_blocks
from drl.model.precision import store_frozen
from drl.plan.memory import COMPILED_SHARE
from drl.plan.predict import Card, Prediction, predict
from drl.types import Context
from drl_engine_local.graphs import ForwardGraphs
from drl_family_sd3.checkpoint import DTYPES
from drl_family_sd3.pipeline import DECODER_BLOCKS

pytestmark = pytest.mark.gpu

LIMIT = 0.15


@pytest.fixture
def cuda(device: str) -> str:
    if not device.startswith("cuda"):
        pytest.skip("a CPU has no allocator that tells its peak")
    return device


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of Stable Diffusion 3.5 Medium's size, of configs alone."""
    folder = tmp_path_factory.mktemp("plan")
    blank = write_blank(folder / "pipeline", MEDIUM)
    text = RECIPE.replace("rank = 4\nalpha = 8", "rank = 32\nalpha = 64").replace(
        "width = 32\nheight = 32", "width = 512\nheight = 512"
    )
    return write_recipe(folder, blank, text)


def planned(recipe_file: Path, *sets: str) -> Prediction:
    catalog = Catalog.load()
    recipe = load_recipe(recipe_file, sets=("cluster.device=cuda", *sets), catalog=catalog)
    return predict(recipe, catalog, Card(name="here"))


@pytest.fixture(scope="module")
def found(recipe_file: Path) -> Prediction:
    return planned(recipe_file, "rollout.local.rows=8")


@pytest.fixture
def model(cuda: str, recipe_file: Path, found: Prediction) -> nn.Module:
    """The transformer with random weights as the trainer holds it."""
    config = SD3Transformer2DModel.load_config(
        recipe_file.parent / "pipeline", subfolder="transformer"
    )
    with torch.device(cuda):
        module = SD3Transformer2DModel.from_config(config)
    recipe = load_recipe(recipe_file, sets=("cluster.device=cuda",), catalog=Catalog.load())
    pipeline = found.anatomy.configs["transformer"]
    adapt(recipe, pipeline, Context(device=cuda), "transformer", 0, module)
    store_frozen(module, "bf16")
    return module.train()


def forward(found: Prediction, model: nn.Module, rows: int, device: str) -> torch.Tensor:
    outline, family = found.anatomy.outline, found.anatomy.family
    record = ConditionRecord(
        tensors={n: torch.zeros(shape, device=device) for n, shape in outline.condition.items()}
    )
    streams = {n: torch.zeros(rows, *shape, device=device) for n, shape in outline.streams.items()}
    time_B = torch.full((rows,), 500.0, device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        condition = family.collate([family.condition(record)] * rows)
        return family.forward(model, streams, time_B, condition)["visual"]


def added(work: Callable[[], object]) -> int:
    """Return the bytes that work adds at its worst moment, once libraries have their workspaces."""
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("rows", [4, 8])
def test_training_holds_what_the_plan_says(
    cuda: str, found: Prediction, model: SD3Transformer2DModel, rows: int, share: float
) -> None:
    if share:
        model.enable_gradient_checkpointing(
            gradient_checkpointing_func=lambda block, *args: recompute(
                block, *args, use_reentrant=False
            )
        )

    def step() -> None:
        forward(found, model, rows, cuda).float().square().mean().backward()

    # the first step makes the gradients, which the plan counts by themselves
    assert added(step) == pytest.approx(found.anatomy.training(share).at(rows).peak, rel=LIMIT)


def test_a_forward_holds_what_the_plan_says(cuda: str, found: Prediction, model: nn.Module) -> None:
    def sample() -> None:
        with torch.no_grad():
            forward(found, model.eval(), 16, cuda)

    assert added(sample) == pytest.approx(found.anatomy.inference.at(16).peak, rel=LIMIT)


def test_a_fingerprint_takes_what_the_plan_says(
    cuda: str, found: Prediction, model: nn.Module
) -> None:
    state = model.state_dict()
    taken = added(lambda: tensors_fingerprint(state, state.values()))
    expected = found.anatomy.bytes.compared
    record("MiB that a fingerprint takes", taken=taken / 2**20, plan=expected / 2**20)
    assert taken == pytest.approx(expected, rel=LIMIT)


@pytest.mark.parametrize(
    ("rows", "compiled"),
    [(16, False), (8, True), (16, True), (32, True)],
    ids=["eager", "compiled, 8 rows", "compiled, 16 rows", "compiled, 32 rows"],
)
def test_a_recorded_forward_keeps_what_the_plan_says(
    cuda: str, found: Prediction, model: nn.Module, rows: int, compiled: bool
) -> None:
    outline, family = found.anatomy.outline, found.anatomy.family
    shapes = outline.condition.items()
    empty = ConditionRecord(tensors={n: torch.zeros(shape, device=cuda) for n, shape in shapes})
    condition = family.collate([family.condition(empty)] * rows)
    streams = {n: torch.zeros(rows, *shape, device=cuda) for n, shape in outline.streams.items()}
    model.eval()
    if compiled:
        blocks = found.anatomy.configs["transformer"].wrap
        compile_blocks(model, blocks, Compilations("transformer"))

    def plain(
        _component: str, given: Streams, time_B: Tensor, known: Conditions, *_: Any
    ) -> Streams:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            return family.forward(model, given, time_B, known.positive)

    arguments = (streams, torch.full((rows,), 500.0, device=cuda), Conditions(positive=condition))
    plain("transformer", *arguments)
    before = reserved()
    graphs = ForwardGraphs(torch.device(cuda))
    graphs.predict(plain, "transformer", *arguments, guidance=Guidance())
    kept = reserved() - before
    expected = found.anatomy.recorded(rows, applied=True) * (COMPILED_SHARE if compiled else 1.0)
    how = f"{rows} rows, {'compiled' if compiled else 'eager'}"
    figures = {how: kept / 2**30, f"{how}: plan": expected / 2**30}
    record("GiB that a recorded forward keeps", **figures)
    graphs.forget()
    assert reserved() - before < 0.1 * kept
    assert kept == pytest.approx(expected, rel=LIMIT)


def reserved() -> int:
    """Return the bytes that the allocator holds once it has given back what it can."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize(("dtype", "compiled"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_decoding_holds_what_the_plan_says(
    cuda: str, recipe_file: Path, dtype: str, compiled: bool
) -> None:
    found = planned(
        recipe_file,
        f"model.sd3.vae_dtype={dtype}",
        f"model.sd3.compile_vae={str(compiled).lower()}",
    )
    config = AutoencoderKL.load_config(recipe_file.parent / "pipeline", subfolder="vae")
    with torch.device(cuda):
        vae = AutoencoderKL.from_config(config).eval()
    nn.Module.to(vae, DTYPES[dtype])
    if compiled:
        compile_blocks(vae.decoder, DECODER_BLOCKS, Compilations("vae"))
    shape = (found.anatomy.outline.decode_rows, *found.anatomy.outline.streams["visual"])
    latents = torch.zeros(shape, device=cuda, dtype=vae.dtype)

    def decode() -> None:
        with torch.no_grad():
            images = vae.decode(latents, return_dict=False)[0]
            (images.float() / 2 + 0.5).clamp(0, 1)

    peak, expected = added(decode), found.anatomy.decoding.peak
    name = f"{dtype}{', compiled' * compiled}"
    record("GiB of decoding 8 pictures", **{name: peak / 2**30, f"{name}: plan": expected / 2**30})
    assert peak == pytest.approx(expected, rel=LIMIT)


@pytest.fixture
def full(cuda: str) -> Iterator[None]:
    """A process that may take no more of the card than it has, and that uses all of what it has.

    What other tests of this process left to the allocator would be room for a small run.
    """
    torch.zeros(1, device=cuda)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.device(cuda)).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**21) / total)
    taken = [filled(size, cuda) for size in (2**22, 2**20)]
    yield
    taken.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)


def filled(size: int, device: str) -> list[torch.Tensor]:
    """Return blocks of so many bytes, as many as there is room for."""
    blocks: list[torch.Tensor] = []
    with suppress(torch.OutOfMemoryError):
        while True:
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
    return blocks


@pytest.mark.usefixtures("full")
def test_a_full_card_is_a_message(recipe: Path, tmp_path: Path, cuda: str) -> None:
    with pytest.raises(OutOfMemory) as caught:
        run_here(recipe, tmp_path / "run", f"cluster.device={cuda}")
    text = str(caught.value)
    assert text.startswith("out of memory in ")
    assert "the plan: " in text
    assert "turn one of these" in text
