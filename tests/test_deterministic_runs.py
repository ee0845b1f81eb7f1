"""``train.deterministic`` through the product: two runs are equal to the bit, on one rank and on two."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from e2e import metric_rows, run_here, set_words, trained_weights, write_recipe
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from drl.errors import BadInput, RankError

SETS = (
    "train.deterministic=true",
    "checkpoint.save_interval=2",
    "lora.dropout=0.1",
    "eval.after_train=true",
)


def pictures(run_dir: Path) -> dict[str, bytes]:
    files = sorted((run_dir / "samples").rglob("*.png"))
    return {str(f.relative_to(run_dir)): Image.open(f).tobytes() for f in files}


def adapters(run_dir: Path) -> dict[str, Tensor]:
    files = (run_dir / "adapter").rglob("*.safetensors")
    return {f"{f.name} {name}": tensor for f in files for name, tensor in load_file(f).items()}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    same = all(torch.equal(left[name], right[name]) for name in left)
    return bool(left) and left.keys() == right.keys() and same


def test_two_runs_are_equal_to_the_bit_and_leave_nothing_behind(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    runs = [tmp_path / "a", tmp_path / "b"]
    for run_dir in runs:
        run_here(recipe, run_dir, *SETS)
    first, second = runs
    assert metric_rows(first) == metric_rows(second)
    assert equal(trained_weights(first, 2), trained_weights(second, 2))
    assert equal(adapters(first), adapters(second))
    assert pictures(first) == pictures(second) != {}
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_flash_attention_that_is_not_there_stops_before_the_run_directory(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    with pytest.raises(BadInput, match="not installed here"):
        run_here(recipe, tmp_path / "run", SETS[0], "train.attention_backend=flash")
    assert not (tmp_path / "run").exists()


def test_a_kernel_without_a_deterministic_form_is_found_by_the_check(
    tmp_path: Path, checkpoint: Path, drl: Callable[..., tuple[int, str, str]]
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    sets = ("--set", "train.deterministic=true", "--set", "train.attention_backend=sage")
    code, _, said = drl("config", "check", str(recipe), *sets)
    assert code == 2
    assert "'sage' has no deterministic form" in said


@pytest.mark.slow
def test_ranks_of_their_own_processes_are_deterministic_too(
    tmp_path: Path, checkpoint: Path
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)
    ranks = ("cluster.actor_num_gpus_per_node=2", SETS[0])
    for name in ("a", "b"):
        run_here(recipe, tmp_path / name, *ranks, "checkpoint.save_interval=2")
    assert equal(*(trained_weights(tmp_path / name, 2) for name in ("a", "b")))


FORMULA = """
import os
import torch
from drl.api import LossOutput

def formula(pairs, inputs, predictions, transition):
    ranks = torch.distributed
    rank = ranks.get_rank() if ranks.is_initialized() else 0
    if rank == int(os.environ["ODD_RANK"]):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cudnn.deterministic
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
    loss_B = -transition.joint_log_prob
    return LossOutput.weighted(loss_B, pairs.weight_B, {})
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A formula with an operator that has no deterministic kernel, on one rank."""
    (tmp_path / "acme_odd_formula.py").write_text(FORMULA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return lambda rank: monkeypatch.setenv("ODD_RANK", str(rank))


ODD = (SETS[0], "algorithm.custom_loss=acme_odd_formula:formula", "eval.datasets=[]")


def test_an_operator_without_a_deterministic_kernel_ends_the_run_with_its_name(
    tmp_path: Path,
    checkpoint: Path,
    odd: Callable[[int], None],
    drl: Callable[..., tuple[int, str, str]],
) -> None:
    odd(0)
    recipe = write_recipe(tmp_path, checkpoint)
    words = ("--run-dir", str(tmp_path / "run"), *set_words(ODD))
    code, _, err = drl("run", str(recipe), *words)
    assert code == 1
    assert err.startswith("train.deterministic: the operator put_ has no deterministic kernel")
    assert "train.deterministic = false" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_rank_in_a_process_of_its_own_names_it_too(
    tmp_path: Path, checkpoint: Path, odd: Callable[[int], None]
) -> None:
    odd(1)
    recipe = write_recipe(tmp_path, checkpoint)
    with pytest.raises(RankError, match="the operator put_ has no deterministic kernel"):
        run_here(recipe, tmp_path / "run", *ODD, "cluster.actor_num_gpus_per_node=2")
