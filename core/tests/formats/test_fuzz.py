"""Mutated files and random adapters: one clear error or the right answer, never anything else."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drl.errors import BadInput
from drl.formats.adapter import Adapter, AdapterLayer, config_of
from drl.formats.combine import combine
from drl.formats.compare import compare
from drl.formats.describe import describe
from drl.formats.fused import fuse, split
from drl.formats.layout import ComponentLayout
from drl.formats.read import read_adapter
from drl.formats.write import write_adapter

Layout = dict[str, ComponentLayout]
MUTATIONS = 150


def mutated_keys(
    tensors: dict[str, torch.Tensor], chance: random.Random
) -> dict[str, torch.Tensor]:
    """Rename, drop, double, reshape, retype or poison one tensor."""
    changed = dict(tensors)
    key = chance.choice(sorted(changed))
    tensor = changed.pop(key)
    choice = chance.randrange(7)
    if choice == 0:
        changed[key[::-1]] = tensor
    elif choice == 1:
        changed[key.replace("lora", "loha", 1)] = tensor
    elif choice == 2:
        changed[key] = tensor.flatten()[: max(1, tensor.numel() // 2)].clone()
    elif choice == 3:
        changed[key] = tensor.to(torch.int32)
    elif choice == 4:
        changed[key] = torch.full_like(tensor, float("nan"))
    elif choice == 5:
        changed[key] = tensor
        changed[key + ".weight"] = tensor.clone()
    return changed


@pytest.mark.parametrize("name", ["diffusers", "kohya", "comfy"])
def test_mutated_tensors_are_refused_or_mean_what_they_say(
    name: str, tmp_path: Path, toy_layout: Layout, make_adapter: Callable[..., Adapter]
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    file = write_adapter(adapter, name, tmp_path / "good.safetensors", toy_layout)
    tensors, chance = load_file(file), random.Random(5)
    refused = 0
    for _ in range(MUTATIONS):
        save_file(mutated_keys(tensors, chance), tmp_path / "bad.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                again = read_adapter(tmp_path / "bad.safetensors", layout=toy_layout)
            except BadInput:
                refused += 1
                continue
        for layers in again.components.values():
            for path, layer in layers.items():
                assert torch.isfinite(layer.A).all()
                assert torch.isfinite(layer.B).all()
                assert layer.shape == toy_layout["transformer"].weights[path]
    assert refused > MUTATIONS // 2


@pytest.mark.parametrize("name", ["diffusers", "kohya", "peft"])
def test_flipped_bytes_are_an_error_or_a_value(
    name: str, tmp_path: Path, toy_layout: Layout, make_adapter: Callable[..., Adapter]
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    out = write_adapter(adapter, name, tmp_path / "a.safetensors", toy_layout)
    file = out / "adapter_model.safetensors" if out.is_dir() else out
    content, chance = file.read_bytes(), random.Random(3)
    for _ in range(MUTATIONS):
        damaged = bytearray(content)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for look in (lambda: describe(out), lambda: read_adapter(out, layout=toy_layout)):
                try:
                    look()
                except BadInput as error:
                    assert str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("kept", range(0, 400, 37))
def test_any_truncation_is_an_error(
    kept: int, tmp_path: Path, toy_layout: Layout, make_adapter: Callable[..., Adapter]
) -> None:
    adapter = make_adapter(toy_layout["transformer"].weights)
    file = write_adapter(adapter, "kohya", tmp_path / "a.safetensors", toy_layout)
    file.write_bytes(file.read_bytes()[:kept])
    for look in (describe, lambda path: read_adapter(path, layout=toy_layout)):
        with pytest.raises(BadInput, match=r"a\.safetensors"):
            look(file)


def layer(shape: tuple[int, int], rank: int, alpha: float, seed: int) -> AdapterLayer:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(rank, shape[1], generator=generator)
    return AdapterLayer(A=A, B=torch.randn(shape[0], rank, generator=generator), alpha=alpha)


def delta(one: AdapterLayer) -> torch.Tensor:
    B, A = one.factors()
    return B @ A


parts = st.lists(
    st.one_of(st.none(), st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 4.0, 7.0]))),
    min_size=1,
    max_size=4,
).filter(lambda given: any(part is not None for part in given))


@settings(max_examples=60, deadline=None)
@given(described=parts, seed=st.integers(0, 1000))
def test_fusing_and_splitting_are_inverse(
    described: list[tuple[int, float] | None], seed: int
) -> None:
    rows = [3 + number for number in range(len(described))]
    made = [
        None if one is None else layer((rows[n], 6), one[0], one[1], seed + n)
        for n, one in enumerate(described)
    ]
    for before, after in zip(made, split(fuse(made, rows), rows), strict=True):
        if before is None:
            assert after is None
            continue
        assert after is not None
        assert after.rank == before.rank
        torch.testing.assert_close(delta(after), delta(before), rtol=0, atol=1e-4)


modules = st.dictionaries(
    st.from_regex(r"(blocks\.[0-9]{1,2}\.)?(attn|ff)\.(to_q|to_out\.0|net_2)", fullmatch=True),
    st.tuples(st.integers(1, 5), st.sampled_from([0.25, 1.0, 3.0, 16.0])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(described=modules)
def test_a_made_config_describes_every_layer(described: dict[str, tuple[int, float]]) -> None:
    layers = {path: layer((4, 4), rank, alpha, 1) for path, (rank, alpha) in described.items()}
    made = config_of(Adapter(components={"transformer": layers}), "transformer")
    for path, one in layers.items():
        assert made.rank_of(path) == one.rank
        assert made.scale_of(path) == pytest.approx(one.scale)


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(-2, 2), min_size=1, max_size=3),
    rank=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_concatenation_is_linear(weights: list[float], rank: int, seed: int) -> None:
    layers = [layer((7, 5), rank, 2.0, seed + n) for n in range(len(weights))]
    single = [Adapter(components={"transformer": {"x": one}}) for one in layers]
    total = combine(list(zip(single, weights, strict=True)), method="concat", rank=None)
    wanted = sum(w * delta(one) for w, one in zip(weights, layers, strict=True))
    done = delta(total.components["transformer"]["x"])
    torch.testing.assert_close(done, wanted, rtol=0, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(ranks=st.tuples(st.integers(1, 12), st.integers(1, 12)), seed=st.integers(0, 1000))
def test_differences_are_symmetric_in_their_distance(ranks: tuple[int, int], seed: int) -> None:
    first, second = (
        Adapter(components={"transformer": {"x": layer((9, 7), rank, 3.0, seed + n)}})
        for n, rank in enumerate(ranks)
    )
    (there,), (back,) = compare(first, second), compare(second, first)
    assert there.relative * there.first == pytest.approx(back.relative * back.first, rel=1e-9)
    assert (there.first, there.second) == (back.second, back.first)
