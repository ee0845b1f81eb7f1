"""The same recipe gives the same bits on the device: twice, and after a kill and a resume."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from e2e import metric_rows, run_here, set_words, start_run, trainer_state
from gpu.facts import record
from gpu.runs import deterministic, difference, first_difference, open_run, roll_out

pytestmark = pytest.mark.gpu

ITERATIONS = "train.num_rollout=6"


def why(recipe: Path, folder: Path, left: Path, right: Path, *sets: str) -> str:
    """Say where two runs part, and whether deterministic kernels keep them together."""
    found = f"first at {first_difference(left, right)}"
    try:
        with deterministic():
            for name in ("c", "d"):
                run_here(recipe, folder / name, *sets)
    except RuntimeError as error:
        return f"{found}; with deterministic kernels: {str(error).splitlines()[0][:200]}"
    again = difference(trainer_state(folder / "c", 2), trainer_state(folder / "d", 2))
    return f"{found}; with deterministic kernels: {again}"


@pytest.mark.parametrize("generator", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_seed_twice_gives_the_same_bits(
    recipe: Path, tmp_path: Path, device: str, dtype: str, generator: str
) -> None:
    sets = (
        f"cluster.device={device}",
        f"train.forward_dtype={dtype}",
        f"sampling.generator_device={generator}",
        "eval.datasets=[]",
    )
    for name in ("a", "b"):
        run_here(recipe, tmp_path / name, *sets)
    found = difference(trainer_state(tmp_path / "a", 2), trainer_state(tmp_path / "b", 2))
    if found != "equal":
        found += "; " + why(recipe, tmp_path, tmp_path / "a", tmp_path / "b", *sets)
    record("same seed twice", **{f"{dtype}, noise from {generator}": found})
    assert found == "equal"
    assert metric_rows(tmp_path / "a") == metric_rows(tmp_path / "b")


def test_noise_of_one_seed_depends_on_the_generators_device(
    recipe: Path, tmp_path: Path, device: str, fp32: tuple[str, ...]
) -> None:
    if device == "cpu":
        pytest.skip("both generators are on the CPU here")
    pictures = []
    for generator in ("cpu", "cuda"):
        sets = (*fp32, f"sampling.generator_device={generator}", "eval.datasets=[]")
        with open_run(recipe, tmp_path / generator, *sets) as run:
            rollout, _ = roll_out(run)
            pictures.append([sample.media.pixels for sample in rollout.samples if sample.media])
    assert all((a - b).abs().max() > 0 for a, b in zip(*pictures, strict=True))


def test_a_device_with_a_number_is_the_same_device(
    recipe: Path, tmp_path: Path, device: str
) -> None:
    numbered = f"{device}:0" if device == "cuda" else device
    for name, where in (("a", device), ("b", numbered)):
        sets = (f"cluster.device={where}", "train.forward_dtype=fp32", "train.num_rollout=1")
        run_here(recipe, tmp_path / name, *sets)
    first, second = (metric_rows(tmp_path / name) for name in ("a", "b"))
    rewards = ("rollout/reward/raw_mean", "eval/heldout")
    for one, other in zip(first, second, strict=True):
        assert [one.get(name) for name in rewards] == [other.get(name) for name in rewards]


def killed_after(recipe: Path, run_dir: Path, rows: int, *sets: str) -> None:
    """Start a run in a process of its own and kill it once its metrics have that many rows."""
    process = start_run(recipe, run_dir, *set_words(sets))
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= rows):
        assert process.stdout is not None
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run did not get far enough in two minutes"
        time.sleep(0.02)
    process.kill()
    process.wait()


def test_a_killed_run_that_is_resumed_is_as_equal_as_a_run_that_is_repeated(
    recipe: Path, tmp_path: Path, fp32: tuple[str, ...]
) -> None:
    sets = (*fp32, ITERATIONS, "eval.datasets=[]")
    killed_after(recipe, tmp_path / "killed", 3, *sets)
    assert not (tmp_path / "killed" / "summary.json").exists()
    run_here(recipe, tmp_path / "killed", *sets, resume=True)
    for name in ("straight", "repeated"):
        run_here(recipe, tmp_path / name, *sets)
    states = {n: trainer_state(tmp_path / n, 6) for n in ("killed", "straight", "repeated")}
    resumed = difference(states["killed"], states["straight"])
    repeated = difference(states["repeated"], states["straight"])
    record("kill -9 and resume", resumed=resumed, repeated=repeated)
    assert resumed == "equal" or repeated != "equal", resumed
    assert [row["step"] for row in metric_rows(tmp_path / "killed")] == list(range(6))
