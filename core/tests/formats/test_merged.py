"""Merged pipelines: float32 merge, one rounding, shards, and everything else left as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drl.errors import BadInput, DrlError
from drl.formats.adapter import Adapter, AdapterLayer
from drl.formats.layout import pipeline_layout, tensor_facts
from drl.formats.merged import (
    Change,
    changes_of,
    check_written,
    plan_shards,
    write_pipeline,
)
from drl.formats.peft_folder import read_peft_folder

MakePipeline = Callable[..., Path]
MakeLayer = Callable[..., AdapterLayer]
WEIGHTS = {"mid.to_q": (6, 4), "conv_in": (4, 3, 3, 3), "head": (5, 4)}
STEM = "diffusion_pytorch_model"


@pytest.fixture
def base(tmp_path: Path, make_pipeline: MakePipeline) -> Path:
    return make_pipeline(
        tmp_path / "base",
        {"transformer": WEIGHTS, "text_encoder": {"q": (2, 2)}},
        tables={"pos_embed.table": torch.linspace(0, 1, 7), "ids": torch.arange(3)},
    )


def merged_by_hand(W: torch.Tensor, layer: AdapterLayer) -> torch.Tensor:
    product = layer.B.double().flatten(1) @ layer.A.double().flatten(1)
    return (W.double().flatten(1) + layer.scale * product).reshape(W.shape)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def test_adapted_weights_change_and_nothing_else(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    layers = {path: make_layer(WEIGHTS[path], alpha=3.0) for path in ("mid.to_q", "conv_in")}
    out = write_pipeline(base, {"transformer": Change(layers=layers)}, tmp_path / "out")
    before, after = weights(base / "transformer"), weights(out / "transformer")
    assert list(after) == list(before)
    for path, layer in layers.items():
        wanted = merged_by_hand(before[f"{path}.weight"], layer)
        torch.testing.assert_close(after[f"{path}.weight"].double(), wanted, rtol=0, atol=2e-6)
    for name in set(before) - {"mid.to_q.weight", "conv_in.weight"}:
        assert torch.equal(before[name], after[name])
    for file in (
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/model.safetensors",
    ):
        assert (out / file).read_bytes() == (base / file).read_bytes()
    assert json.loads((out / "drl_export.json").read_text())["format"] == "merged"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_is_one_rounding_of_the_float32_merge(
    base: Path, tmp_path: Path, make_layer: MakeLayer, dtype: torch.dtype
) -> None:
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4), alpha=3.0)})}
    exact = weights(write_pipeline(base, change, tmp_path / "fp32") / "transformer")
    rounded = weights(write_pipeline(base, change, tmp_path / "half", dtype=dtype) / "transformer")
    for name, tensor in exact.items():
        if name in ("pos_embed.table", "ids"):  # no weight of a module: it keeps its precision
            assert torch.equal(rounded[name], tensor)
        else:
            assert torch.equal(rounded[name], tensor.to(dtype))


def test_a_half_precision_base_is_merged_in_float32(
    tmp_path: Path, make_pipeline: MakePipeline, make_layer: MakeLayer
) -> None:
    base = make_pipeline(tmp_path / "b", {"transformer": WEIGHTS}, dtype=torch.bfloat16)
    layer = make_layer((6, 4), alpha=0.37)
    out = write_pipeline(
        base, {"transformer": Change(layers={"mid.to_q": layer})}, tmp_path / "out"
    )
    W = weights(base / "transformer")["mid.to_q.weight"]
    merged = weights(out / "transformer")["mid.to_q.weight"]
    assert torch.equal(merged, merged_by_hand(W, layer).to(torch.bfloat16))


def test_whole_tensors_replace_those_of_the_base(base: Path, tmp_path: Path) -> None:
    new = {"head.weight": torch.randn(5, 4), "mid.to_q.bias": torch.randn(6)}
    out = write_pipeline(base, {"transformer": Change(tensors=new)}, tmp_path / "out")
    after = weights(out / "transformer")
    assert all(torch.equal(after[name], tensor) for name, tensor in new.items())


def test_a_text_encoder_keeps_its_file_name(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    change = {"text_encoder": Change(layers={"q": make_layer((2, 2), rank=1)})}
    out = write_pipeline(base, change, tmp_path / "out")
    assert (out / "text_encoder" / "model.safetensors").is_file()
    assert not torch.equal(
        weights(out / "text_encoder")["q.weight"], weights(base / "text_encoder")["q.weight"]
    )


def test_shards_have_the_index_that_diffusers_writes(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4))})}
    whole = weights(write_pipeline(base, change, tmp_path / "one") / "transformer")
    out = write_pipeline(base, change, tmp_path / "many", shard_bytes=200) / "transformer"
    files = sorted(file.name for file in out.glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files[0] == f"{STEM}-00001-of-{count:05d}.safetensors"
    index = json.loads((out / f"{STEM}.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], whole[name])
    assert pipeline_layout(tmp_path / "many")["transformer"].weights == WEIGHTS


def test_a_sharded_base_can_be_merged_again(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4))})}
    first = write_pipeline(base, change, tmp_path / "first", shard_bytes=200)
    second = write_pipeline(first, change, tmp_path / "second")
    files = [file.name for file in (second / "transformer").glob("*.safetensors*")]
    assert files == [f"{STEM}.safetensors"]  # no old shard, no old index
    facts = tensor_facts(second / "transformer")
    assert set(facts) == set(weights(base / "transformer"))


@pytest.mark.parametrize(
    ("sizes", "limit", "shards"),
    [
        ({"a": 4, "b": 4, "c": 4}, 8, [["a", "b"], ["c"]]),
        ({"a": 9, "b": 1}, 8, [["a"], ["b"]]),
        ({"a": 1, "b": 9, "c": 1}, 8, [["a"], ["b"], ["c"]]),
        ({"a": 1, "b": 1}, 8, [["a", "b"]]),
        ({}, 8, [[]]),
    ],
)
def test_shards_are_cut_in_order(
    sizes: dict[str, int], limit: int, shards: list[list[str]]
) -> None:
    assert plan_shards(sizes, limit) == shards


def test_links_take_no_space_and_copies_share_nothing(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4))})}
    file = Path("text_encoder") / "model.safetensors"
    linked = write_pipeline(base, change, tmp_path / "linked", link=True)
    copied = write_pipeline(base, change, tmp_path / "copied")
    assert os.path.samefile(base / file, linked / file)
    assert not os.path.samefile(base / file, copied / file)
    config = Path("transformer") / "config.json"  # of a changed component: always its own
    assert not os.path.samefile(base / config, linked / config)


def test_only_the_components_of_the_pipeline_are_taken(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    (base / "leftover").mkdir()
    (base / "single_file.safetensors").write_bytes(b"x")
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4))})}
    out = write_pipeline(base, change, tmp_path / "out")
    names = {path.name for path in out.iterdir()}
    assert names == {
        "model_index.json",
        "drl_export.json",
        "scheduler",
        "text_encoder",
        "transformer",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vae": Change()}, "vae has no safetensors weights"),
        ({"transformer": Change(tensors={"gone.weight": torch.ones(1)})}, "not there gone.weight"),
        (
            {"transformer": Change(tensors={"head.weight": torch.ones(2, 2)})},
            r"head.weight: \[2, 2\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    base: Path, tmp_path: Path, change: dict[str, Change], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        write_pipeline(base, change, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_quantised_weights_are_refused_only_where_they_change(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    file = base / "transformer" / f"{STEM}.safetensors"
    tensors = load_file(file)
    tensors["mid.to_q.weight"] = tensors["mid.to_q.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4))})}
    with pytest.raises(BadInput, match=r"mid.to_q.weight of the base is F8_E4M3"):
        write_pipeline(base, change, tmp_path / "out")
    other = {"transformer": Change(layers={"head": make_layer((5, 4))})}
    out = write_pipeline(base, other, tmp_path / "out")
    assert weights(out / "transformer")["mid.to_q.weight"].dtype is torch.float8_e4m3fn


def test_a_file_that_changed_after_writing_is_noticed(
    base: Path, tmp_path: Path, make_layer: MakeLayer
) -> None:
    change = {"transformer": Change(layers={"mid.to_q": make_layer((6, 4))})}
    out = write_pipeline(base, change, tmp_path / "out")
    with pytest.raises(DrlError, match="came back different"):
        check_written(out / "transformer", {f"{STEM}.safetensors": "0" * 64})


def test_biases_and_saved_modules_of_peft_find_their_tensors(make_layer: MakeLayer) -> None:
    adapter = Adapter(
        components={"transformer": {"mid.to_q": make_layer((6, 4))}},
        others={
            "transformer": {
                "mid.to_q.base_layer.bias": torch.ones(6),
                "head.weight": torch.ones(5, 4),
            }
        },
    )
    change = changes_of(adapter)["transformer"]
    assert set(change.tensors) == {"mid.to_q.bias", "head.weight"}
    assert set(change.layers) == {"mid.to_q"}


GOLDEN = (
    "plain", "rslora", "patterns", "conv", "embedding", "bias_all", "bias_lora_only",
    "modules_to_save", "saved_bf16",
)  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_adapters_merge_to_the_weights_that_peft_computed(
    case: str, golden: Path, tmp_path: Path
) -> None:
    place = golden / "peft-0.21.2" / case
    facts = json.loads((place / "case.json").read_text())
    toy = load_file(golden / facts["base"] / "base.safetensors")
    folder = tmp_path / "base" / "transformer"
    folder.mkdir(parents=True)
    save_file(toy, folder / f"{STEM}.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"_class_name": "Toy"}')
    (tmp_path / "base" / "model_index.json").write_text('{"transformer": ["toy", "Toy"]}')
    adapter = read_peft_folder(place)
    out = write_pipeline(tmp_path / "base", changes_of(adapter), tmp_path / "out")
    after, io = weights(out / "transformer"), load_file(place / "io.safetensors")
    merged = {
        key.removeprefix("merged."): value for key, value in io.items() if key[:7] == "merged."
    }
    for name, wanted in merged.items():
        torch.testing.assert_close(after[name], wanted, rtol=0, atol=1e-5)
    adapted = {f"{path}.weight" for path in facts["wrapped"]}
    changed = {name for name in toy if not torch.equal(toy[name], after[name])}
    assert adapted <= changed
    if not adapter.others:
        assert changed == adapted
