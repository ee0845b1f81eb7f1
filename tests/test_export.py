"""Exports of a trained adapter: the same picture in every tool, from every format, within float32 rounding."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained import (
    build_pipeline,
    diffusers_pipeline,
    diffusers_pixels,
    drl_pixels,
    far,
    train,
)

from drl.errors import BadInput, CheckpointError
from drl.export import EXPORT_FORMATS, Exported, Wanted, export, state_of_live, weights_of
from drl.formats.compare import compare
from drl.formats.layout import pipeline_layout
from drl.formats.read import read_adapter

ROUNDING = 2e-5
MERGED_UPDATER = 'sync.updater="in_process_merged"'


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline(tmp_path_factory.mktemp("pipeline") / "tiny-sd3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    return train(tmp_path_factory.mktemp("trained"), pipeline, "eval.datasets=[]")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    sets = ("eval.datasets=[]", "lora.enabled=false", "train.num_rollout=1", "optimizer.lr=0.01")
    return train(tmp_path_factory.mktemp("full"), pipeline, *sets)


@pytest.fixture(scope="module")
def ours(pipeline: Path, run: Path) -> torch.Tensor:
    return drl_pixels(pipeline, run / "adapter")


@pytest.fixture(scope="module")
def exports(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    folder = tmp_path_factory.mktemp("exports")
    return {name: export(wanted(run, name, folder)) for name in EXPORT_FORMATS}


def wanted(source: Path, name: str, folder: Path, **settings: object) -> Wanted:
    out = folder / (f"{name}.safetensors" if name in ("kohya", "comfy") else name)
    return Wanted(source=source, format=name, out=out, **settings)  # type: ignore[arg-type]


def test_the_adapter_shows_in_the_picture(pipeline: Path, ours: torch.Tensor) -> None:
    base = drl_pixels(pipeline)
    assert far(base, ours) > 0.02
    assert far(base, diffusers_pixels(diffusers_pipeline(pipeline))) < ROUNDING


@pytest.mark.parametrize("name", ["peft", "diffusers", "kohya", "comfy"])
def test_drl_makes_the_same_picture_of_every_export(
    name: str, exports: dict[str, Exported], pipeline: Path, ours: torch.Tensor
) -> None:
    assert far(drl_pixels(pipeline, exports[name].path), ours) < ROUNDING


def test_the_merged_pipeline_makes_it_in_drl_and_in_diffusers(
    exports: dict[str, Exported], ours: torch.Tensor
) -> None:
    merged = exports["merged"].path
    assert far(drl_pixels(merged), ours) < ROUNDING
    assert far(diffusers_pixels(diffusers_pipeline(merged)), ours) < ROUNDING


@pytest.mark.parametrize("name", ["peft", "diffusers"])
def test_a_diffusers_pipeline_loads_it_with_default_arguments(
    name: str, exports: dict[str, Exported], pipeline: Path, ours: torch.Tensor
) -> None:
    pipe = diffusers_pipeline(pipeline)
    pipe.load_lora_weights(exports[name].path)
    assert far(diffusers_pixels(pipe), ours) < ROUNDING


def test_stock_peft_loads_it(
    exports: dict[str, Exported], pipeline: Path, ours: torch.Tensor
) -> None:
    peft = pytest.importorskip("peft")
    pipe = diffusers_pipeline(pipeline)
    pipe.transformer = peft.PeftModel.from_pretrained(pipe.transformer, exports["peft"].path)
    assert far(diffusers_pixels(pipe), ours) < ROUNDING


def test_the_kohya_round_trip_loads_in_diffusers(
    exports: dict[str, Exported], pipeline: Path, ours: torch.Tensor, tmp_path: Path
) -> None:
    back = export(wanted(exports["kohya"].path, "diffusers", tmp_path, base=str(pipeline)))
    pipe = diffusers_pipeline(pipeline)
    pipe.load_lora_weights(back.path)
    assert far(diffusers_pixels(pipe), ours) < ROUNDING


def test_baked_files_are_right_for_readers_without_metadata(
    run: Path, pipeline: Path, ours: torch.Tensor, tmp_path: Path
) -> None:
    done = export(wanted(run, "diffusers", tmp_path, baked=True))
    file = done.path / "pytorch_lora_weights.safetensors"
    bare = tmp_path / "bare" / file.name
    bare.parent.mkdir()
    save_file(load_file(file), bare, metadata={"format": "pt"})
    pipe = diffusers_pipeline(pipeline)
    pipe.load_lora_weights(bare.parent)
    assert far(diffusers_pixels(pipe), ours) < ROUNDING


def test_patterns_and_rslora_keep_their_strength_everywhere(pipeline: Path, tmp_path: Path) -> None:
    sets = (
        "eval.datasets=[]",
        "train.num_rollout=1",
        "lora.use_rslora=true",
        "lora.rank_pattern={to_q = 2}",
        "lora.alpha_pattern={to_v = 3.0}",
        MERGED_UPDATER,
    )
    source = train(tmp_path / "t", pipeline, *sets)
    here = drl_pixels(pipeline, source / "adapter")
    assert far(here, drl_pixels(pipeline)) > 0.01
    pipe = diffusers_pipeline(pipeline)
    pipe.load_lora_weights(export(wanted(source, "diffusers", tmp_path)).path)
    assert far(diffusers_pixels(pipe), here) < ROUNDING
    kohya = export(wanted(source, "kohya", tmp_path)).path
    assert far(drl_pixels(pipeline, kohya), here) < ROUNDING
    merged = export(wanted(source, "merged", tmp_path)).path
    assert far(diffusers_pixels(diffusers_pipeline(merged)), here) < ROUNDING


def test_start_values_of_the_base_are_in_every_export(pipeline: Path, tmp_path: Path) -> None:
    sets = ("eval.datasets=[]", "train.num_rollout=1", 'lora.init_weights="pissa"', MERGED_UPDATER)
    source = train(tmp_path / "t", pipeline, *sets)
    here = drl_pixels(pipeline, source / "adapter")
    assert far(here, drl_pixels(pipeline)) > 0.001
    for name in ("peft", "kohya"):
        done = export(wanted(source, name, tmp_path))
        assert far(drl_pixels(pipeline, done.path), here) < ROUNDING
    merged = export(wanted(source, "merged", tmp_path)).path
    assert far(diffusers_pixels(diffusers_pipeline(merged)), here) < ROUNDING


def test_saved_modules_and_biases_go_to_peft_and_merged_only(
    pipeline: Path, tmp_path: Path
) -> None:
    sets = (
        "eval.datasets=[]",
        "train.num_rollout=1",
        'lora.modules_to_save=["proj_out"]',
        'lora.bias="lora_only"',
        MERGED_UPDATER,
    )
    source = train(tmp_path / "t", pipeline, *sets)
    here = drl_pixels(pipeline, source / "adapter")
    for name in ("diffusers", "kohya"):
        with pytest.raises(BadInput, match=r"LoRA matrices only.*--format peft or merged"):
            export(wanted(source, name, tmp_path))
    peft = export(wanted(source, "peft", tmp_path)).path
    assert far(drl_pixels(pipeline, peft), here) < ROUNDING
    merged = export(wanted(source, "merged", tmp_path)).path
    assert far(diffusers_pixels(diffusers_pipeline(merged)), here) < ROUNDING


def test_a_run_gives_its_newest_checkpoint_or_the_one_that_is_asked_for(run: Path) -> None:
    newest, second, first = (weights_of(run, step=step) for step in (None, 2, 1))
    assert newest.adapter is not None
    assert second.adapter is not None
    assert first.adapter is not None
    assert newest.origin.endswith("iter_0000002")
    assert all(line.relative == 0 for line in compare(newest.adapter, second.adapter))
    assert any(line.relative > 0.1 for line in compare(newest.adapter, first.adapter))
    again = weights_of(run / "checkpoints" / "iter_0000001").adapter
    assert again is not None
    assert all(line.relative == 0 for line in compare(first.adapter, again))
    with pytest.raises(BadInput, match=r"--step 7.*after 1, 2 iterations"):
        weights_of(run, step=7)


def test_the_newest_checkpoint_is_the_adapter_beside_it(run: Path) -> None:
    ours = weights_of(run).adapter
    assert ours is not None
    assert all(line.relative == 0 for line in compare(ours, read_adapter(run / "adapter")))


def test_a_damaged_checkpoint_is_refused_and_named(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    part = next((copy / "checkpoints" / "iter_0000002" / "model").glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match="iter_0000002 cannot be used"):
        export(wanted(copy, "peft", tmp_path))
    assert not (tmp_path / "peft").exists()
    assert export(wanted(copy, "peft", tmp_path, step=1)).modules == 15


def test_averaged_weights_need_a_run_that_kept_them(run: Path) -> None:
    with pytest.raises(BadInput, match=r"no averaged weights .*ema.enabled"):
        weights_of(run, ema=True)


def test_averaged_weights_are_exported(pipeline: Path, tmp_path: Path) -> None:
    sets = (
        "eval.datasets=[]",
        "train.num_rollout=1",
        "ema.enabled=true",
        'ema.rollout_policy="ema"',
    )
    source = train(tmp_path / "t", pipeline, *sets)
    plain, averaged = weights_of(source).adapter, weights_of(source, ema=True).adapter
    assert plain is not None
    assert averaged is not None
    assert any(line.relative > 0 for line in compare(plain, averaged))
    done = export(wanted(source, "peft", tmp_path, ema=True))
    assert "averaged" in done.origin
    assert all(line.relative == 0 for line in compare(averaged, read_adapter(done.path)))


def test_a_full_weights_run_exports_a_pipeline(full: Path, pipeline: Path, tmp_path: Path) -> None:
    weights = weights_of(full)
    assert weights.adapter is None
    merged = export(wanted(full, "merged", tmp_path)).path
    state = load_file(merged / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, tensor in weights.dense["transformer"].items():
        assert torch.equal(state[name], tensor)
    assert far(diffusers_pixels(diffusers_pipeline(merged)), drl_pixels(merged)) < ROUNDING
    assert far(drl_pixels(merged), drl_pixels(pipeline)) > 1e-3


@pytest.mark.parametrize("name", ["peft", "diffusers", "kohya", "comfy"])
def test_a_full_weights_run_has_no_adapter(full: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"trained full weights.*--format merged"):
        export(wanted(full, name, tmp_path))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_dtype_reaches_the_file(
    run: Path, exports: dict[str, Exported], tmp_path: Path, dtype: str
) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tensors = load_file(export(wanted(run, "kohya", tmp_path, dtype=dtype)).path)
    assert {t.dtype for key, t in tensors.items() if not key.endswith("alpha")} == {kind}
    merged = export(wanted(run, "merged", tmp_path, dtype=dtype)).path
    name = Path("transformer") / "diffusion_pytorch_model.safetensors"
    half, whole = load_file(merged / name), load_file(exports["merged"].path / name)
    assert half["pos_embed.pos_embed"].dtype is torch.float32  # a table, no weight
    for key, tensor in whole.items():
        wanted_dtype = torch.float32 if key == "pos_embed.pos_embed" else kind
        assert torch.equal(half[key], tensor.to(wanted_dtype))


def test_links_keep_the_base_and_save_space(run: Path, pipeline: Path, tmp_path: Path) -> None:
    before = digest(pipeline)
    merged = export(wanted(run, "merged", tmp_path, link=True)).path
    assert os.path.samefile(merged / "vae" / "config.json", pipeline / "vae" / "config.json")
    assert digest(pipeline) == before


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_nothing_is_overwritten_and_nothing_left_behind(run: Path, tmp_path: Path) -> None:
    for name in EXPORT_FORMATS:
        task = wanted(run, name, tmp_path)
        task.out.write_text("precious")
        with pytest.raises(BadInput, match="exists already"):
            export(task)
        assert task.out.read_text() == "precious"
        task.out.unlink()
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_fit_the_source_are_refused(
    run: Path, exports: dict[str, Exported], tmp_path: Path
) -> None:
    kohya, peft = exports["kohya"].path, exports["peft"].path
    for source, settings, words in (
        (peft, {"step": 1}, "--step: .* is a PEFT adapter, not a run"),
        (peft, {"ema": True}, "--ema"),
        (run / "checkpoints" / "iter_0000001", {"step": 1}, "one step already"),
        (kohya, {}, r"kohya adapter file; its module names .*--base"),
        (run, {"component": "vae"}, "--component vae: the adapter has transformer"),
        (exports["merged"].path, {}, "is no adapter: diffusers pipeline"),
    ):
        with pytest.raises(BadInput, match=words):
            export(wanted(source, "peft", tmp_path, **settings))
    with pytest.raises(BadInput, match="--baked is for adapters"):
        export(wanted(run, "merged", tmp_path, baked=True))
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_of_another_base_is_refused(run: Path, tmp_path: Path) -> None:
    other = build_pipeline(tmp_path / "other")
    file = other / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = "transformer_blocks.0.attn.to_q.weight"
    tensors[name] = torch.zeros(32, 48)
    save_file(tensors, file, metadata={"format": "pt"})
    for kind in ("kohya", "merged", "peft"):
        with pytest.raises(BadInput, match=r"another base model(?s:.)*attn.to_q"):
            export(wanted(run, kind, tmp_path, base=str(other)))


def test_original_names_of_stable_diffusion_3_are_in_the_single_files(
    exports: dict[str, Exported], pipeline: Path
) -> None:
    keys = load_file(exports["kohya"].path)
    assert "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight" in keys
    assert pipeline_layout(pipeline)["transformer"].class_name == "SD3Transformer2DModel"
    facts = json.loads((exports["merged"].path / "drl_export.json").read_text())
    assert facts["base"] == str(pipeline)
    assert facts["changed"] == {"transformer": 15}


@pytest.mark.parametrize(
    ("live", "key"),
    [
        ("a.to_q.lora_A.default.weight", "a.to_q.lora_A.weight"),
        ("a._orig_mod.to_q.lora_B.default.weight", "a.to_q.lora_B.weight"),
        ("proj_out.modules_to_save.default.weight", "proj_out.weight"),
        ("lora_head.modules_to_save.default.inner.bias", "lora_head.inner.bias"),
        ("a.to_q.lora_bias.default", "a.to_q.base_layer.bias"),
        ("norm.lora_bias.default", "norm.bias"),
        ("emb.lora_embedding_A.default", "emb.lora_embedding_A"),
    ],
)
def test_live_names_become_keys_of_a_file(live: str, key: str) -> None:
    names = ["a.to_q.lora_A.default.weight", live]
    state = state_of_live({name: torch.ones(1) for name in names})
    assert key in state
