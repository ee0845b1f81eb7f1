"""Adapters of a whole run: every option of [lora] at work, saved, read by PEFT, and started from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from e2e import (
    checkpoint_folder,
    final_state,
    metric_rows,
    run_here,
    same,
    summary_of,
    trained_weights,
    write_recipe,
)
from peft import PeftModel
from safetensors.torch import load_file

from drl.checkpoint.folders import TRACKER
from drl.errors import RecipeError
from drl.lora import LoraError, adapter_state, load_peft, read_peft
from drl_family_sd3.tiny import build_random

AUTO = "sync.updater=auto"  # must find that these adapters have to be merged
SETTINGS = (
    'lora.target_modules=["attn.to_q", "attn.to_out.0", "pos_embed.proj", "proj_out"]',
    'lora.exclude_modules=["transformer_blocks.1.attn.to_out.0"]',
    'lora.rank_pattern=[["transformer_blocks.0.attn.to_q", 2]]',
    'lora.alpha_pattern=[["pos_embed.proj", 3.0]]',
    "lora.use_rslora=true",
    "lora.bias=all",
    'lora.modules_to_save=["context_embedder"]',
    "lora.init_weights=orthogonal",
    AUTO,
    "eval.datasets=[]",
    "optimizer.lr=0.01",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "tiny-sd3"
    build_random(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"), checkpoint)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Path:
    folder = tmp_path_factory.mktemp("full") / "run"
    run_here(recipe, folder, *SETTINGS, "checkpoint.save_interval=1")
    return folder


def transformer(checkpoint: Path) -> torch.nn.Module:
    folder = checkpoint / "transformer"
    return SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.float32).eval()


def velocity(model: torch.nn.Module) -> torch.Tensor:
    config, generator = model.config, torch.Generator().manual_seed(3)
    with torch.no_grad():
        output: torch.Tensor = model(
            hidden_states=torch.randn(2, config.in_channels, 4, 4, generator=generator),
            encoder_hidden_states=torch.randn(
                2, 5, config.joint_attention_dim, generator=generator
            ),
            pooled_projections=torch.randn(2, config.pooled_projection_dim, generator=generator),
            timestep=torch.tensor([300.0, 700.0]),
            return_dict=False,
        )[0]
    return output


def test_every_setting_reaches_the_saved_adapter(run_dir: Path) -> None:
    fields = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["use_rslora"]) == (4, 8, True)
    assert fields["rank_pattern"] == {"transformer_blocks.0.attn.to_q": 2}
    assert fields["alpha_pattern"] == {"pos_embed.proj": 3.0}
    assert fields["exclude_modules"] == ["transformer_blocks.1.attn.to_out.0"]
    assert fields["bias"] == "all"
    assert fields["modules_to_save"] == ["context_embedder"]
    assert fields["init_lora_weights"] is True  # PEFT has no orthogonal start of convolutions
    config, state = read_peft(run_dir / "adapter")
    assert config.rank_of("transformer_blocks.0.attn.to_q") == 2
    assert state["pos_embed.proj.lora_A.weight"].dim() == 4
    assert "transformer_blocks.1.attn.to_out.0.lora_A.weight" not in state
    assert {"context_embedder.weight", "pos_embed.proj.base_layer.bias"} <= set(state)


def test_everything_trains_and_the_checkpoint_holds_it(run_dir: Path, checkpoint: Path) -> None:
    first, last = trained_weights(run_dir, 1), trained_weights(run_dir, 2)
    assert first.keys() == last.keys()
    still = [name for name in last if torch.equal(first[name], last[name])]
    assert [name for name in still if "lora_bias" not in name] == []
    parts = ("lora_A", "lora_B", "lora_bias", "modules_to_save")
    for part in parts:
        assert any(f".{part}." in name and name not in still for name in last), part
    assert all(any(f".{part}." in name for part in parts) for name in last)
    rows = [row for row in metric_rows(run_dir) if "train/grad_norm" in row]
    assert all(row["train/skipped_steps"] == 0 for row in rows)


def test_peft_computes_what_drl_computes(run_dir: Path, checkpoint: Path) -> None:
    ours = transformer(checkpoint)
    load_peft(ours, run_dir / "adapter")
    stock = PeftModel.from_pretrained(transformer(checkpoint), run_dir / "adapter").eval()
    expected = velocity(ours)
    torch.testing.assert_close(velocity(stock.base_model.model), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(velocity(transformer(checkpoint)), expected, atol=1e-3)


def test_pissa_trains_and_is_saved_as_a_plain_adapter(
    recipe: Path, checkpoint: Path, tmp_path: Path
) -> None:
    run_here(recipe, tmp_path / "run", "lora.init_weights=pissa", AUTO, "eval.datasets=[]")
    config, _ = read_peft(tmp_path / "run" / "adapter")
    assert (config.rank, config.alpha, config.init) == (8, 16, "kaiming-uniform")
    load_peft(transformer(checkpoint), tmp_path / "run" / "adapter")


def test_a_resumed_pissa_run_ends_with_the_bits_of_one_that_went_through(
    recipe: Path, tmp_path: Path
) -> None:
    """The start values are in no checkpoint: they follow from the base weights again."""
    sets = ("lora.init_weights=pissa", AUTO, "eval.datasets=[]", "checkpoint.save_interval=1")
    run_here(recipe, tmp_path / "whole", *sets)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    (tmp_path / "again" / "checkpoints" / TRACKER).write_text("1")
    shutil.rmtree(checkpoint_folder(tmp_path / "again", 2))
    run_here(recipe, tmp_path / "again", *sets, resume=True)
    assert same(final_state(tmp_path / "again"), final_state(tmp_path / "whole"))


def test_a_run_starts_from_an_adapter_and_takes_its_settings(
    run_dir: Path, recipe: Path, tmp_path: Path
) -> None:
    text = recipe.read_text().replace("rank = 4\nalpha = 8\n", "")
    plain = recipe.parent / "start.toml"
    plain.write_text(text)
    source = run_dir / "adapter"
    sets = (f"lora.adapter_path={source}", AUTO, "eval.datasets=[]")
    run_here(plain, tmp_path / "run", *sets, "train.num_rollout=1", "optimizer.lr=0")
    config, before = read_peft(source)
    after_config, after = read_peft(tmp_path / "run" / "adapter")
    assert same(after, before)  # a learning rate of 0 leaves it as it was read
    assert (after_config.rank_pattern, after_config.use_rslora) == (config.rank_pattern, True)
    resolved = (tmp_path / "run" / "recipe.toml").read_text()
    assert "use_rslora = true" in resolved
    assert summary_of(tmp_path / "run")["iterations"] == 1


def test_a_start_adapter_of_another_model_stops_the_run_before_anything(
    run_dir: Path, recipe: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (run_dir / "adapter").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    fields = json.loads((other / "adapter_config.json").read_text())
    fields["target_modules"] = ["nothing_like_it"]
    (other / "adapter_config.json").write_text(json.dumps(fields))
    sets = (f"lora.adapter_path={other}", AUTO)
    plain = recipe.parent / "start.toml"
    plain.write_text(recipe.read_text().replace("rank = 4\nalpha = 8\n", ""))
    with pytest.raises(LoraError, match="belongs to another model"):
        run_here(plain, tmp_path / "run", *sets)
    with pytest.raises(RecipeError, match="no trainable adapters"):
        run_here(recipe, tmp_path / "run", "lora.is_trainable=false")


def test_a_file_of_the_run_is_the_state_that_training_holds(
    run_dir: Path, checkpoint: Path
) -> None:
    model = transformer(checkpoint)
    load_peft(model, run_dir / "adapter")
    stored = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    state = adapter_state(model)
    assert {f"base_model.model.{key}" for key in state} == set(stored)
    trained = trained_weights(run_dir, 2)
    assert len(trained) == len(state)
