"""Ranks as processes: calls reach all of them, and whatever ends one ends all, with its own words."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranked_trainer import (
    Trainer,
    dying,
    full_weights,
    make_shards,
    make_trainer,
    raising,
    refusing,
    start,
    stuck,
)

from drl.cluster.ranks import all_of, check_devices, threads_per_rank
from drl.cluster.ranks_wire import dumps
from drl.errors import BadInput, ContractError, DrlError, RankError
from drl.model.parallel import RankSettings
from drl.testing import make_pair

ROOT = Path(__file__).resolve().parents[3]


def nothing_is_left() -> bool:
    return not active_children() and not dist.is_initialized()


def test_calls_reach_every_rank_and_none_outlives_the_run(tmp_path: Path) -> None:
    before = (torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME"))
    trainer = start(full_weights)
    alone = make_trainer()
    (file,) = trainer.write_weights(tmp_path / "model")
    (right,) = alone.write_weights(tmp_path / "right")
    assert file.name == "transformer.safetensors"
    assert file.read_bytes() == right.read_bytes()
    got = list(trainer.train(make_shards(6, 2, steps=3)))
    expected = list(alone.train(make_shards(6, 1, steps=3)))
    assert [r.metrics["train/loss"] for r in got] == pytest.approx(
        [r.metrics["train/loss"] for r in expected], rel=1e-5
    )
    assert (trainer.global_step, trainer.next_rollout) == (3, 1)
    trainer.sleep()
    with pytest.raises(ContractError, match="sleeps"):
        trainer.own.replay(make_shards(6, 2))  # without the others: the ranks live on
    trainer.wake()
    (after,), (right_after,) = (
        list(one.train(make_shards(6, world))) for one, world in ((trainer, 2), (alone, 1))
    )
    assert after.metrics == pytest.approx(right_after.metrics, rel=1e-4)
    trainer.close()
    trainer.close()
    assert nothing_is_left()
    assert (torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")) == before
    with pytest.raises(RankError, match="the trainer was closed"):
        list(trainer.train(make_shards(6, 2)))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (dying, r"^rank 1 of 2 failed: rank 1 died \(SIGKILL: often the system, out of memory\)$"),
        (raising, r"^rank 1 of 2 failed: Traceback .*ValueError: a bug of rank 1$"),
    ],
)
def test_a_rank_that_ends_ends_the_run_with_its_own_words(
    build: Callable[..., Trainer], said: str
) -> None:
    trainer = start(build)
    reports = trainer.train(make_shards(8, 2, steps=2))
    next(reports)
    began = time.monotonic()
    with pytest.raises(RankError, match=f"(?s){said}"):
        list(reports)
    assert time.monotonic() - began < 15
    assert nothing_is_left()
    with pytest.raises(RankError, match="the ranks of the trainer have ended: rank 1 of 2 failed"):
        trainer.replay(make_shards(8, 2))
    trainer.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus_train_alike_and_end_when_one_dies() -> None:
    """NCCL would wait for a dead rank until its timeout of ten minutes."""
    trainer = start(full_weights, device="cuda")
    alone = make_trainer()
    got = list(trainer.train(make_shards(6, 2, steps=3)))
    expected = list(alone.train(make_shards(6, 1, steps=3)))
    assert [r.metrics["train/loss"] for r in got] == pytest.approx(
        [r.metrics["train/loss"] for r in expected], rel=1e-3
    )
    trainer.close()
    trainer = start(dying, device="cuda")
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed: rank 1 died"):
        list(trainer.train(make_shards(8, 2, steps=2)))
    assert time.monotonic() - began < 60
    assert nothing_is_left()


def test_a_rank_that_cannot_build_says_why_with_its_exit_code() -> None:
    with pytest.raises(
        RankError, match=r"^rank 1 of 2 failed: rank 1 does not like this recipe$"
    ) as caught:
        start(refusing)
    assert caught.value.exit_code == BadInput.exit_code
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.exit_code) == (str(caught.value), 2)
    assert nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drl.cluster.ranks.GRACE_S", 0.5)
    trainer = start(stuck, timeout_s=2.0)
    began = time.monotonic()
    with pytest.raises(
        RankError, match=r"one did not come within 2 s \(cluster\.distributed_timeout"
    ):
        list(trainer.train(make_shards(8, 2, steps=2)))
    assert time.monotonic() - began < 15
    assert nothing_is_left()


def test_a_loop_that_stops_in_the_middle_of_training_ends_the_ranks() -> None:
    trainer = start(full_weights)
    reports = trainer.train(make_shards(8, 2, steps=2))
    next(reports)
    reports.close()
    assert nothing_is_left()
    trainer.close()


DRIVER = """
import sys
sys.path[:0] = {path!r}
from ranked_trainer import full_weights, make_shards, start

if __name__ == "__main__":
    trainer = start(full_weights)
    list(trainer.train(make_shards(4, 2)))
    print(*[process.pid for process in trainer.group.others], flush=True)
    sys.stdin.read()
"""


def gone(pid: int) -> bool:
    """True when a process has ended; a zombie that nobody waits for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_ranks_of_a_killed_driver_end_themselves(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(path=[str(ROOT / "tests")]))
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert driver.stdout is not None
    (pid,) = map(int, driver.stdout.readline().split())
    assert not gone(pid)
    driver.kill()
    driver.communicate()
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_a_shard_travels_without_the_storage_behind_it() -> None:
    rollout = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
    pair = make_pair(latent=(1000,))
    shared = torch.ones(1000, 10)
    pairs = [
        replace(pair, tensors={"visual": rollout[n], "text": shared.view(10_000)}, id=(n,))
        for n in range(3)
    ]
    content = dumps(pairs)
    # three rows of 4 kB, one shared tensor of 40 kB, and what every pair carries besides
    assert 52_000 < len(content) < 60_000
    back = pickle.loads(content)
    for sent, got in zip(pairs, back, strict=True):
        assert got.id == sent.id
        assert torch.equal(got.tensors["visual"], sent.tensors["visual"])
    assert back[0].tensors["text"].data_ptr() == back[2].tensors["text"].data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.randn(3, requires_grad=True),
    ],
    ids=["scalar", "empty", "bf16", "transposed", "bool", "leaf"],
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    back = pickle.loads(dumps({"x": tensor, "n": np.float64(2.0)}))
    assert back["x"].dtype == tensor.dtype
    assert back["x"].shape == tensor.shape
    assert torch.equal(back["x"], tensor)
    assert not back["x"].requires_grad
    back["x"].zero_()  # writable


def test_tensors_that_only_look_alike_are_not_mixed_up() -> None:
    base = torch.arange(4.0)
    views = [base, base[:2], base[2:], base.view(2, 2), base.view(2, 2).t(), base.view(torch.int32)]
    for sent, got in zip(views, pickle.loads(dumps(views)), strict=True):
        assert torch.equal(sent, got)
        assert sent.dtype == got.dtype


def test_a_save_of_all_ranks_is_done_when_the_last_is() -> None:
    parts: list[Future[None]] = [Future(), Future(), Future()]
    whole = all_of(parts)
    parts[2].set_result(None)
    parts[0].set_exception(OSError("disk full"))
    assert not whole.done()
    parts[1].set_exception(DrlError("later"))
    with pytest.raises(OSError, match="disk full"):
        whole.result(timeout=0)
    fine: list[Future[None]] = [Future()]
    done = all_of(fine)
    fine[0].set_result(None)
    assert done.result(timeout=0) is None


def test_threads_are_shared_out_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(8, world) for world in (2, 3, 16)] == [4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert threads_per_rank(6, 4) == 6


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match="actor_num_gpus_per_node = 2, but 1 GPUs are visible"):
        check_devices(RankSettings(world=2, device="cuda"))
    check_devices(RankSettings(world=2, device="cpu"))


def test_every_rank_has_its_own_device() -> None:
    assert [RankSettings(world=2, device="cuda").device_of(r) for r in (0, 1)] == [
        "cuda:0",
        "cuda:1",
    ]
    assert RankSettings(world=2, device="cpu").device_of(1) == "cpu"
    assert RankSettings(world=1, device="cuda:3").device_of(0) == "cuda:3"


def test_a_state_of_two_ranks_is_read_by_two_and_by_one(tmp_path: Path) -> None:
    """Saved at once and in the background, with the optimizer: the next steps are the same."""
    trainer = start(full_weights)
    list(trainer.train(make_shards(6, 2, steps=2)))
    for name in ("now", "later", "again"):
        (tmp_path / name).mkdir()
    trainer.save(tmp_path / "now")
    saved = trainer.begin_save(tmp_path / "later")
    expected = [r.metrics["train/loss"] for r in trainer.train(make_shards(6, 2, steps=2))]
    saved.result(timeout=60)
    for name in ("now", "later"):
        assert trainer.restore(tmp_path / name) == 1
        again = [r.metrics["train/loss"] for r in trainer.train(make_shards(6, 2, steps=2))]
        assert again == expected
    trainer.close()
    alone = make_trainer()
    assert alone.restore(tmp_path / "later") == 1
    assert alone.global_step == 2
    got = [r.metrics["train/loss"] for r in alone.train(make_shards(6, 1, steps=2))]
    assert got == pytest.approx(expected, rel=1e-5)
