"""``drl sample``: the picture of a run's evaluation, fixed by its seed, with a sheet and what was used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e import run_here, write_recipe
from PIL import Image
from safetensors.torch import load_file, save_file
from trained import SAMPLING, TRAINING, build_pipeline, diffusers_pipeline, drl_pixels, far

from drl.export import Wanted, export

Drl = Callable[..., tuple[int, str, str]]
SMALL = ("--size", "32x32", "--steps", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline(tmp_path_factory.mktemp("pipeline") / "tiny-sd3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    """A run that evaluates, with the engine's own number of rows."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, pipeline)
    sets = (*TRAINING, "eval.n_samples_per_prompt=2", "rollout.local.rows=8")
    run_here(recipe, folder / "run", *sets)
    return folder / "run"


def picture(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"), dtype=np.int16)


def index_of(folder: Path) -> dict:
    return json.loads((folder / "samples.json").read_text())


@pytest.mark.parametrize(("label", "adapted"), [("before", False), ("after", True)])
def test_it_is_the_picture_of_the_runs_evaluation(
    drl: Drl, run: Path, pipeline: Path, tmp_path: Path, label: str, adapted: bool
) -> None:
    rows = json.loads((run / "samples" / label / "samples.json").read_text())
    assert len(rows) == 6
    seeds = ",".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    prompts = tmp_path / "prompts.jsonl"
    texts = list(dict.fromkeys(row["prompt"] for row in rows))
    prompts.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    adapter = ["--adapter", str(run / "adapter")] if adapted else []
    out = tmp_path / "out"
    code, text, _ = drl(
        "sample", str(pipeline), *adapter, "--prompts", str(prompts), "--seeds", seeds, *SMALL,
        "--out", str(out),
    )  # fmt: skip
    assert code == 0
    assert text.strip() == str(out / "sheet.png")
    made = {(one["prompt"], one["seed"]): one["file"] for one in index_of(out)["pictures"]}
    for row in rows:
        ours = picture(out / made[row["prompt"], row["seed"]])
        theirs = picture(run / "samples" / label / row["file"])
        assert np.array_equal(ours, theirs)


def test_the_same_command_gives_the_same_files(drl: Drl, pipeline: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        arguments = ["--prompt", "sign 1", "--seeds", "0,1", *SMALL, "--out", str(tmp_path / name)]
        assert drl("sample", str(pipeline), *arguments)[0] == 0
    for file in ("0000.png", "0001.png", "sheet.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "0000.png").read_bytes() != (tmp_path / "a" / "0001.png").read_bytes()


def test_a_seed_does_not_depend_on_its_neighbours(drl: Drl, pipeline: Path, tmp_path: Path) -> None:
    base = ["sample", str(pipeline), "--prompt", "sign 1", *SMALL]
    drl(*base, "--seeds", "3", "--out", str(tmp_path / "alone"))
    drl(*base, "--prompt", "sign 2", "--seeds", "7,3,5", "--out", str(tmp_path / "many"))
    one = next(p for p in index_of(tmp_path / "many")["pictures"] if p["seed"] == 3)
    assert one["prompt"] == "sign 1"
    alone = picture(tmp_path / "alone" / "0000.png")
    assert np.array_equal(alone, picture(tmp_path / "many" / one["file"]))


def test_compare_makes_a_row_without_and_a_row_with_the_adapter(
    drl: Drl, run: Path, pipeline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--adapter", str(run / "adapter"), "--compare", "--prompt", "sign 1"]
    code, _, _ = drl(
        "sample", str(pipeline), *arguments, "--seeds", "0,1,2", *SMALL, "--out", str(out)
    )
    assert code == 0
    pictures = index_of(out)["pictures"]
    assert [one["adapter"] for one in pictures] == [False] * 3 + [True] * 3
    assert [one["seed"] for one in pictures] == [0, 1, 2] * 2
    for left, right in zip(pictures[:3], pictures[3:], strict=True):
        assert not np.array_equal(picture(out / left["file"]), picture(out / right["file"]))
    sheet = Image.open(out / "sheet.png")
    assert sheet.width > 1.4 * sheet.height * 3 / 4  # three columns, two rows


def test_the_index_says_everything_that_was_used(
    drl: Drl, run: Path, pipeline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--adapter", str(run / "adapter"), "--prompt", "sign 1", "--guidance", "2.5"]
    assert drl("sample", str(pipeline), *arguments, *SMALL, "--out", str(out))[0] == 0
    facts = index_of(out)
    assert facts["family"] == "sd3"
    assert facts["pipeline"] == str(pipeline)
    assert facts["adapter"]["components"]["adapter"]["scales"] == {"2": 15}
    assert facts["sampling"]["guidance_scale"] == 2.5
    assert facts["sampling"]["num_steps"] == 4
    assert (facts["device"], facts["dtype"]) == ("cpu", "fp32")
    assert facts["versions"]["torch"]


def test_prompts_come_from_a_text_file_line_by_line(
    drl: Drl, pipeline: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("sign 1\n\n  sign 2  \n")
    out = tmp_path / "out"
    assert drl("sample", str(pipeline), "--prompts", str(file), *SMALL, "--out", str(out))[0] == 0
    assert [one["prompt"] for one in index_of(out)["pictures"]] == ["sign 1", "sign 2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give prompts with --prompt"),
        (["--prompt", "a", "--prompts", "{file}"], "and not both"),
        (["--prompts", "{empty}"], "has no prompt in it"),
        (["--prompts", "{rows}"], 'must be a JSON object with a text "input"'),
        (["--prompt", "a", "--size", "32"], "write width x height"),
        (["--prompt", "a", "--size", "33x32"], "--size, width: 33 is no multiple of"),
        (["--prompt", "a", "--size", "32x4096"], "--size, height: 4096 is above"),
        (["--prompt", "a", "--seeds", "one"], "write whole numbers"),
        (["--prompt", "a", "--seeds", "4294967296"], "write whole numbers below 2147483648"),
        (["--prompt", "a", "--compare"], "add --adapter"),
        (["--prompt", "a", "--out", "{file}"], "exists already"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    drl: Drl,
    pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("sign 1\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "sign"}\n')
    places = {"file": "file", "empty": "empty", "rows": "rows.jsonl"}
    filled = [argument.format(**places) for argument in arguments]
    size = [] if "--size" in filled else ["--size", "32x32"]
    code, _, err = drl("sample", str(pipeline), *filled, *size, "--steps", "2", "--device", "cpu")
    assert code == 2, err
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "samples").exists()


def test_a_pipeline_that_is_not_there_is_asked_for_as_the_command_takes_it(
    drl: Drl, tmp_path: Path
) -> None:
    code, _, err = drl("sample", str(tmp_path / "gone"), "--prompt", "a")
    assert code == 2
    assert "give the folder of a diffusers pipeline as PIPELINE, or a hub id" in err
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    code, _, err = drl("sample", str(tmp_path), "--prompt", "a", "--out", str(tmp_path / "o"))
    assert code == 2
    assert "PIPELINE: " in err
    assert "model.checkpoint" not in err


def test_a_folder_that_no_family_claims(drl: Drl, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StrangePipeline"}')
    code, _, err = drl("sample", str(tmp_path), "--prompt", "a", "--out", str(tmp_path / "o"))
    assert code == 2
    assert "no installed family claims" in err
    assert "installed: sd3" in err


def test_an_adapter_of_another_model_is_refused_before_loading(
    drl: Drl, run: Path, tmp_path: Path
) -> None:
    other = build_pipeline(tmp_path / "other")
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"]
    file = other / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if "attn.to_q" not in k}
    save_file(tensors, file, metadata={"format": "pt"})
    code, _, err = drl(
        "sample", str(other), "--adapter", str(run / "adapter"), "--prompt", "a",
        "--out", str(tmp_path / "o"),
    )  # fmt: skip
    assert code == 2
    assert "belongs to another base model" in err


def hand_made(folder: Path, component: str, layers: dict[str, tuple[int, ...]]) -> Path:
    """Write a diffusers file with a seeded update of each weight of this shape."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for path, (out, *inner) in layers.items():
        key = f"{component}.{path}"
        ones = [1] * (len(inner) - 1)
        tensors[f"{key}.lora_A.weight"] = torch.randn(2, *inner, generator=generator) * 0.3
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, 2, *ones, generator=generator) * 0.3
        tensors[f"{key}.alpha"] = torch.tensor(3.0)
    save_file(tensors, folder / "hand.safetensors")
    return folder / "hand.safetensors"


def test_convolutions_reach_the_engine_as_they_reach_a_merged_pipeline(
    pipeline: Path, tmp_path: Path
) -> None:
    layers = {"pos_embed.proj": (32, 4, 2, 2), "transformer_blocks.0.attn.to_q": (32, 32)}
    adapter = hand_made(tmp_path, "transformer", layers)
    merged = export(
        Wanted(source=adapter, format="merged", out=tmp_path / "merged", base=str(pipeline))
    ).path
    plain, adapted, baked_in = (
        drl_pixels(pipeline),
        drl_pixels(pipeline, adapter),
        drl_pixels(merged),
    )
    assert far(plain, adapted) > 0.02
    assert far(adapted, baked_in) < 2e-5


def test_an_adapter_of_a_text_encoder_is_refused_by_name(
    drl: Drl, pipeline: Path, tmp_path: Path
) -> None:
    name = "text_model.encoder.layers.0.self_attn.q_proj"
    adapter = hand_made(tmp_path, "text_encoder", {name: (16, 16)})
    code, _, err = drl(
        "sample", str(pipeline), "--adapter", str(adapter), "--prompt", "a", *SMALL,
        "--out", str(tmp_path / "o"),
    )  # fmt: skip
    assert code == 2
    assert "the adapter changes text_encoder" in err
    assert "--component" in err


def test_a_merged_text_encoder_is_loaded_by_diffusers(pipeline: Path, tmp_path: Path) -> None:
    name = "text_model.encoder.layers.0.self_attn.q_proj"
    adapter = hand_made(tmp_path, "text_encoder", {name: (16, 16)})
    out = export(
        Wanted(source=adapter, format="merged", out=tmp_path / "m", base=str(pipeline))
    ).path
    before, after = (diffusers_pipeline(folder).text_encoder for folder in (pipeline, out))
    weight = before.get_parameter(f"{name}.weight")
    tensors = load_file(adapter)
    key = f"text_encoder.{name}"
    delta = 1.5 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    torch.testing.assert_close(
        after.get_parameter(f"{name}.weight"), weight + delta, rtol=0, atol=1e-5
    )


def test_guidance_and_steps_change_the_picture(pipeline: Path) -> None:
    usual = drl_pixels(pipeline)
    assert far(usual, drl_pixels(pipeline, sampling=replace(SAMPLING, num_steps=5))) > 1e-3
    assert far(usual, drl_pixels(pipeline, sampling=replace(SAMPLING, guidance_scale=3.0))) > 1e-4
