"""``drl plan`` against what torch counts, what a GPU held and took, and what a person reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import run_here, write_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drl.api import ConditionRecord
from drl.catalog import Catalog
from drl.config import load_recipe
from drl.errors import OutOfMemory
from drl.interfaces.family import WeightSource
from drl.model.build import adapt
from drl.observe.timing import Phases
from drl.plan.predict import Card, Prediction, predict
from drl.types import Context

Drl = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[1]
H200 = Card(name="NVIDIA H200", memory=140 * 2**30, torch="2.11.0")
GIB = 2**30


@pytest.fixture(autouse=True)
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was measured on this machine."""
    path = tmp_path / "rates.json"
    monkeypatch.setenv("DRL_RATES", str(path))
    return path


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.load()


@pytest.fixture
def tiny(tmp_path: Path, checkpoint: Path) -> Path:
    return write_recipe(tmp_path / "tiny", checkpoint)


def planned(catalog: Catalog, recipe: Path, *sets: str, card: Card = H200) -> Prediction:
    return predict(load_recipe(recipe, sets=sets, catalog=catalog), catalog, card)


def real_inputs(found: Prediction, rows: int) -> dict[str, Any]:
    outline = found.anatomy.outline
    record = ConditionRecord(
        tensors={name: torch.randn(shape) for name, shape in outline.condition.items()}
    )
    family = found.anatomy.family
    return {
        "streams": {name: torch.randn(rows, *s) for name, s in outline.streams.items()},
        "model_time_B": torch.full((rows,), 500.0),
        "condition": family.collate([family.condition(record)] * rows),
    }


def test_the_work_is_what_torch_counts_on_the_real_model(
    catalog: Catalog, tiny: Path, checkpoint: Path
) -> None:
    found = planned(catalog, tiny)
    recipe = load_recipe(tiny, catalog=catalog)
    module = found.anatomy.family.build("transformer", WeightSource(checkpoint=str(checkpoint)))
    config = found.anatomy.configs["transformer"]
    adapt(recipe, config, Context(), "transformer", 0, module)
    rows = 3
    inputs = real_inputs(found, rows)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = found.anatomy.family.forward(module, **inputs)["visual"]
        forward = counter.get_total_flops()
        output.sum().backward()
        both = counter.get_total_flops()
    blank = found.anatomy.training(0.0).at(rows)
    assert blank.forward_flops == forward
    assert blank.forward_flops + blank.backward_flops == both


def test_recomputing_more_blocks_keeps_less(catalog: Catalog, tiny: Path) -> None:
    found = planned(catalog, tiny)
    kept = [found.anatomy.training(share).at(4).kept for share in (0.0, 0.5, 1.0)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]
    work = [found.instead(checkpointed=share).work.recomputed for share in (0.0, 0.5, 1.0)]
    assert work == [0, pytest.approx(work[2] / 2, rel=0.2), work[2]]


@pytest.mark.parametrize(
    ("sets", "fields"),
    [
        (("train.micro_batch_size=2",), {"rows": 2, "micro_batches": 8, "rank_pairs": 16}),
        (("model.gradient_checkpointing=true",), {"checkpointed": 1.0}),
        (
            ("model.gradient_checkpointing=true", "model.checkpointed_share=0.5"),
            {"checkpointed": 0.5},
        ),
        (("train.compile=true",), {"compiled": True, "engine_compiled": False}),
        (("rollout.local.compile=true",), {"compiled": False, "engine_compiled": True}),
        (("rollout.local.weights=fp32",), {"own_weights": "fp32"}),
        (("rollout.local.weights=forward",), {"own_weights": "forward"}),
        ((), {"own_weights": "shared", "adapters": True, "branches": 1}),
        (("rollout.local.adapters=applied",), {"applied": True}),
        (("rollout.local.rows=2",), {"engine_rows": 2}),
        (
            ("sampling.guidance_scale=4.5", "cluster.device=cuda"),
            {"branches": 2, "trained_branches": 2, "batched": True},
        ),
        (
            ("sampling.guidance_scale=4.5", "sampling.batched_guidance=false"),
            {"branches": 2, "batched": False},
        ),
        (
            ("model.sd3.decode_rows=2", "model.sd3.vae_dtype=bf16"),
            {"decode_rows": 2, "decoded_as": "bf16"},
        ),
        (
            ("model.sd3.text_encoders=released",),
            {"released": frozenset({"text_encoder", "text_encoder_2", "text_encoder_3"})},
        ),
        (
            ("rollout.over_sampling_batch_size=3",),
            {"samples": 12, "prompts": 3, "pairs_per_step": 16},
        ),
        (("optimizer.name=sgd",), {"optimizer_states": 1}),
        (("optimizer.name=sgd", "optimizer.momentum=0"), {"optimizer_states": 0}),
        (("ema.enabled=true", "ema.rollout_policy=ema"), {"copies": 1}),
        (("algorithm.kl_beta=0.1",), {"extra_passes": 1}),
        (
            ("cluster.device=cuda", "cluster.offload=true"),
            {"offload_train": True, "offload_rollout": True},
        ),
        (
            ("cluster.device=cuda", "cluster.offload=true", "cluster.offload_train=false"),
            {"offload_train": False, "offload_rollout": True},
        ),
        (
            ("algorithm.policy_loss.recompute_old_log_prob=true", "train.num_steps_per_rollout=2"),
            {"rescored": True, "optimizer_steps": 2, "pairs_per_step": 8},
        ),
        (
            ("train.micro_batch_size_sample=4", "train.micro_batch_size_tstep=2"),
            {"rows": 8, "row_option": "train.micro_batch_size_sample", "row_steps": 2},
        ),
    ],
)
def test_options_of_a_recipe_reach_its_plan(
    catalog: Catalog, tiny: Path, sets: tuple[str, ...], fields: dict[str, Any]
) -> None:
    scenario = planned(catalog, tiny, *sets).scenario
    assert dataclasses.asdict(scenario).items() >= fields.items()


def test_a_larger_rank_is_larger_adapters(catalog: Catalog, tiny: Path) -> None:
    small, large = (planned(catalog, tiny, f"lora.rank={rank}") for rank in (2, 4))
    assert large.anatomy.bytes.trained == 2 * small.anatomy.bytes.trained
    assert large.anatomy.bytes.adapted == small.anatomy.bytes.adapted
    half = large.instead(rank_factor=0.5)
    assert half.phases[1].state == small.phases[1].state
    assert half.lora_rank == small.lora_rank == 2


def test_full_training_is_planned_too(catalog: Catalog, tiny: Path) -> None:
    found = planned(catalog, tiny, "lora.enabled=false")
    held = found.anatomy.bytes
    assert (held.adapted, held.trained_elements) == (0, held.elements)
    assert found.scenario.own_weights == "fp32"
    trained, frozen = found.anatomy.training(0.0).one, planned(catalog, tiny).anatomy.training(0.0)
    assert trained.backward_flops > 1.3 * frozen.one.backward_flops


def test_the_plan_of_a_run_without_an_engine(catalog: Catalog, checkpoint: Path) -> None:
    supervised = ROOT / "recipes" / "pretrain_glyphs.toml"
    found = planned(catalog, supervised, f"model.checkpoint={checkpoint}")
    assert [phase.name for phase in found.phases] == ["train"]
    assert found.work.sampling == found.work.pushed == 0


def test_a_person_reads_the_plan(drl: Drl, tiny: Path, rates: Path) -> None:
    sets = ("--device-name=NVIDIA H200", "--gpus=1", "--gpus=4")
    small = ("--set", "model.sd3.decode_rows=1")  # or it is decoding that does not fit
    code, out, err = drl("plan", str(tiny), *sets, *small, "--memory=1MB")
    assert code == 0, err
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "2 prompts x 4 samples = 8 samples a rollout"
    assert "4 GPU(s): 8 images per update" in out
    (train, work) = [line.split("│") for line in lines if line.startswith("│ train ")]
    assert (train[1].strip(), train[2].strip()) == ("train", "backward")
    assert float(work[4]) > 0
    assert "pairs/s; rates measured on NVIDIA H200" in out
    assert "does not fit: train needs" in out
    assert "model.gradient_checkpointing = true: " in out
    assert "s an iteration" in out
    assert "\n  all of these: " in out
    assert not rates.exists()
    unknown = drl("plan", str(tiny), "--device-name=Abacus 3000")[1]
    assert "no measured rates for Abacus 3000 in bf16: run  drl bench RECIPE" in unknown
    assert "pairs/s" not in unknown


def test_a_machine_reads_the_plan(drl: Drl, tiny: Path) -> None:
    code, out, _ = drl("plan", str(tiny), "--json", "--memory=1GiB", "--gpus=4")
    assert code == 0
    plan = json.loads(out)
    assert plan["batch"]["images_per_update"] == plan["gpus"][0]["images_per_update"] == 8
    assert [phase["name"] for phase in plan["phases"]] == ["rollout", "train", "update_weights"]
    train = plan["phases"][1]
    names = ("weights", "state", "data", "activations", "workspace")
    assert train["peak"] == sum(train[name] for name in names)
    assert (plan["seconds"], plan["fits"], plan["advice"]) == (None, True, [])
    if not torch.cuda.is_available():
        assert plan["card"]["name"] == "an unnamed card"
        assert "--device-name: 'NVIDIA H200'" in plan["reason"]
    assert plan["card"]["memory"] == GIB


def test_a_checkpoint_without_configs_is_refused_after_the_arithmetic(
    drl: Drl, tiny: Path, checkpoint: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model_index.json").write_bytes((checkpoint / "model_index.json").read_bytes())
    code, out, err = drl("plan", str(tiny), f"--set=model.checkpoint={bare}")
    assert code == 2
    assert "8 samples a rollout" in out
    assert "model.checkpoint: cannot read" in err
    code, out, err = drl("plan", str(tiny), f"--set=model.checkpoint={bare}", "--json")
    assert (code, out) == (2, "")
    assert str(bare) in err


@pytest.mark.parametrize("size", ["24", "many GiB", "GiB", "-1GiB", "0GiB", "²GiB"])
def test_a_size_that_is_none(drl: Drl, tiny: Path, size: str) -> None:
    code, out, err = drl("plan", str(tiny), f"--memory={size}")
    assert (code, out) == (2, "")
    assert "24GiB or 80GB" in err


def test_the_help_teaches(drl: Drl) -> None:
    out = drl("plan", "--help")[1]
    for word in ("drl bench RECIPE", "--memory", "--device-name", "--gpus", "--json"):
        assert word in out


FULL = """
import torch

async def generate(run, request, sampling, evaluation=False):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")

def prepare(pairs, context):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
"""


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full_card.py").write_text(FULL)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("option", "phase", "knob"),
    [
        ("rollout.custom_generate=full_card:generate", "rollout", "model.sd3.text_encoders"),
        ("algorithm.custom_prepare=full_card:prepare", "train", "train.micro_batch_size = 2"),
    ],
)
def test_a_full_card_names_the_phase_the_plan_and_what_to_turn(
    tiny: Path, tmp_path: Path, option: str, phase: str, knob: str
) -> None:
    sets = [option, "reward.type=jpeg", "eval.interval=100", "eval.before_train=false"]
    with pytest.raises(OutOfMemory) as caught:
        run_here(tiny, tmp_path / "run", *sets)
    text = str(caught.value)
    assert text.startswith(f"out of memory in {phase}: CUDA out of memory. Tried to allocate")
    assert "the plan: rollout " in text
    assert "turn one of these" in text
    assert knob in text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.exit_code == 1


def test_a_phase_remembers_which_one_failed() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="x"), phases.phase("train"), phases.phase("inner"):
        raise ValueError("x")
    assert phases.failed == "inner"
    with phases.phase("next"):
        pass
    assert phases.failed == "inner"


def test_functions_of_a_recipe_are_not_called(
    catalog: Catalog, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "it-ran"
    (tmp_path / "functions_to_plan.py").write_text(
        f"open({str(mark)!r}, 'w')\ndef prepare(pairs, context): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = planned(catalog, tiny, "algorithm.custom_prepare=functions_to_plan:prepare")
    assert found.work.total > 0
    assert not mark.exists()


@pytest.mark.parametrize("setting", ["debug.rollout_only=true", "train.num_rollout=0"])
def test_a_recipe_that_trains_nothing_has_its_arithmetic_alone(
    drl: Drl, tiny: Path, setting: str
) -> None:
    code, out, _ = drl("plan", str(tiny), f"--set={setting}")
    assert code == 0
    assert "8 samples a rollout" in out
    assert "memory and work are not predicted: this recipe trains nothing" in out


@pytest.mark.parametrize("lora", ["true", "false"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.attention_backend=flashy", "no attention backend 'flashy'; did you mean 'flash'?"),
        ("train.attention_backend=xformers", "which calls torch's own kernels"),
        ("train.parameter_dtypes=[['nothing*', 'bf16']]", "'nothing*' matches no parameter"),
        ("train.parameter_dtypes=[['*.bias', 'bf16']]", "of different dtypes"),
    ],
)
def test_what_the_run_would_refuse_is_told_by_the_plan(
    drl: Drl, tiny: Path, setting: str, said: str, lora: str
) -> None:
    code, out, err = drl("plan", str(tiny), "--set", setting, "--set", f"lora.enabled={lora}")
    assert code == 2
    assert "8 samples a rollout" in out
    assert said in err


def test_warnings_of_the_recipe_are_said_with_its_plan(drl: Drl, tiny: Path) -> None:
    code, out, err = drl("plan", str(tiny), "--set", "model.checkpointed_share=0.5", "--json")
    assert code == 0
    assert json.loads(out)
    assert err.startswith("warning: model.checkpointed_share  is not used")


def test_a_plan_for_another_card_does_not_miss_it_here(drl: Drl, tiny: Path) -> None:
    words = ("--memory", "24GiB", "--set", "cluster.offload=true")
    assert drl("plan", str(tiny), *words)[::2] == (0, "")
    assert "no other place" in drl("plan", str(tiny), *words[2:])[2]
