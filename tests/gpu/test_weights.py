"""Weights on the device: what a push leaves in the engine, and what an adapter is elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from e2e import run_here, summary_of, write_recipe
from gpu.facts import record
from gpu.runs import open_run
from peft import PeftModel
from torch import Tensor, nn

from drl.config.machine import detect
from drl.interfaces.family import WeightSource
from drl.loop import train
from drl.lora import AdapterTensors, adapters, load_peft, lora_layers, merge_delta
from drl.run import Run

pytestmark = pytest.mark.gpu

STRONG = "optimizer.lr=0.05"
"""Adapters that have moved far: a merge that is lost or doubled shows."""


def engine_model(run: Run) -> nn.Module:
    """Return the engine's own transformer."""
    assert run.engines is not None
    engine: Any = run.engines.engine
    model: nn.Module = engine.store.components["transformer"].model
    return model


def sync_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return what was noted of every push."""
    return [json.loads(line) for line in (run_dir / "sync.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("adapters, fp32 engine", ("rollout.local.weights=fp32",)),
        ("adapters, bf16 engine", ("rollout.local.weights=forward",)),
        ("adapters merged by the trainer", ("sync.updater=in_process_merged",)),
        ("full weights, fp32 engine", ("lora.enabled=false", "optimizer.lr=1e-4")),
        ("small buckets", ("sync.buffer_size=4096",)),
    ],
)
def test_every_push_is_proven_by_checksum(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], name: str, sets: tuple[str, ...]
) -> None:
    run_here(recipe, tmp_path / "run", *bf16, *sets, "eval.datasets=[]")
    rows = sync_rows(tmp_path / "run")
    assert [row["version"] for row in rows] == [0, 1, 2]
    assert {row["verdict"] for row in rows} == {"checksum equal"}
    assert len({row["checksum"] for row in rows}) == 3
    record("pushes proven by checksum", **{name: len(rows)})


@pytest.mark.parametrize("weights", ["fp32", "forward", "shared"])
def test_the_engine_holds_the_cpus_merge_up_to_one_rounding(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], fp32: tuple[str, ...], weights: str
) -> None:
    # under bf16 the trainer's own base is bf16, and another one than that of a float32 copy
    dtype = fp32 if weights == "fp32" else bf16
    sets = (*dtype, f"rollout.local.weights={weights}", STRONG, "eval.datasets=[]")
    with open_run(recipe, tmp_path / "run", *sets) as run:
        train(run)
        held = dict(engine_model(run).named_parameters())
        module = run.components["transformer"].module
        bases = {name: layer.base_layer.weight for name, layer in lora_layers(module).items()}
        counts = [
            _compare(held[f"{name}.weight"], bases[name], pair)
            for name, pair in adapters(module).items()
        ]
    unequal, moved, total = (sum(column) for column in zip(*counts, strict=True))
    record("merge in the engine", **{f"{weights} weights": f"{unequal} of {total} differ"})
    assert moved > total / 2, "the adapters do not show"
    assert unequal <= total * (1 if weights == "fp32" else 0.01)


def _compare(held: Tensor, weight: Tensor, pair: AdapterTensors) -> tuple[int, int, int]:
    """Count the elements that differ from the CPU's merge, that the adapter moved, and all.

    No element may be further away than one rounding to bf16; in float32 the order of a sum shows too.
    """
    roundings = 1 if held.dtype == torch.bfloat16 else 4
    base = weight.detach().to(held.dtype).cpu()
    expected = merge_delta(base, pair.A.detach().cpu(), pair.B.detach().cpu(), pair.scale)
    ours = held.detach().cpu()
    largest = torch.maximum(expected.abs(), base.abs()).float().clamp(min=0.1)
    allowed = roundings * torch.finfo(held.dtype).eps * largest
    assert ((ours.float() - expected.float()).abs() <= allowed).all()
    return int((ours != expected).sum()), int((expected != base).sum()), expected.numel()


def test_trainer_and_engine_hold_the_same_buffers_on_the_device(
    recipe: Path, tmp_path: Path, device: str, bf16: tuple[str, ...]
) -> None:
    with open_run(recipe, tmp_path / "run", *bf16, "rollout.local.weights=forward") as run:
        ours = dict(run.components["transformer"].module.named_buffers())
        theirs = dict(engine_model(run).named_buffers())
        assert ours.keys() == theirs.keys()
        assert ours
        for name, buffer in ours.items():
            assert buffer.device.type == theirs[name].device.type == torch.device(device).type
            assert torch.equal(buffer, theirs[name]), name


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, device: str) -> Path:
    """A trained adapter as a run on the device saves it."""
    folder = tmp_path_factory.mktemp("trained")
    sets = (f"cluster.device={device}", "train.forward_dtype=bf16", STRONG, "eval.datasets=[]")
    run_here(write_recipe(folder, checkpoint), folder / "run", *sets)
    return folder / "run" / "adapter"


def prediction(model: nn.Module, device: str) -> Tensor:
    """Return the model's output for fixed inputs, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "hidden_states": (2, 4, 16, 16),
        "encoder_hidden_states": (2, 32, 32),
        "pooled_projections": (2, 32),
    }
    inputs = {k: torch.randn(s, generator=generator).to(device) for k, s in shapes.items()}
    with torch.no_grad():
        time = torch.tensor([250.0, 800.0], device=device)
        output: Tensor = model.to(device).eval()(**inputs, timestep=time, return_dict=False)[0]
    return output.cpu()


def test_an_adapter_trained_on_the_device_is_the_same_model_in_peft(
    checkpoint: Path, adapter: Path, recipe: Path, tmp_path: Path, device: str
) -> None:
    def base() -> nn.Module:
        model: nn.Module = SD3Transformer2DModel.from_pretrained(
            checkpoint, subfolder="transformer"
        )
        return model

    plain = prediction(base(), device)
    theirs = prediction(PeftModel.from_pretrained(base(), str(adapter)), device)
    with open_run(recipe, tmp_path / "run", "cluster.device=cpu") as run:
        source = WeightSource(checkpoint=str(checkpoint), device=device)
        module = run.family.build("transformer", source)
    load_peft(module, adapter)
    ours = prediction(module, device)
    record("adapter in PEFT", worst=(ours - theirs).abs().max().item())
    assert (plain - ours).abs().max() > 0.02
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-5)


def test_supervised_training_encodes_pictures_on_the_device(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...]
) -> None:
    text = recipe.read_text()
    start, end = text.index("[rollout]"), text.index("[train]")
    recipe.write_text(
        text[:start].replace('prompt_data = "prompts.jsonl"', 'source = "glyphs"')
        + '[data.glyphs]\ncount = 16\n[rollout]\nbatch_size = 8\n[algorithm]\nloss = "sft_loss"\n'
        + text[end:]
    )
    size = ("sampling.width=48", "sampling.height=16")
    run_here(recipe, tmp_path / "run", *bf16, *size, "train.train_only=true", "eval.datasets=[]")
    assert summary_of(tmp_path / "run")["iterations"] == 2


def test_this_machines_gpu_is_found_without_torch(device: str) -> None:
    if device == "cpu":
        pytest.skip("the device under test is the CPU")
    assert detect().cuda
