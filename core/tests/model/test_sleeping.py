"""A trainer that sleeps between its steps trains as one that never did, and can be saved meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranked_trainer import make_shards, make_trainer, weights
from safetensors.torch import load_file

from drl.errors import ContractError
from drl.model.ema import Ema, EmaSettings
from drl.model.shared import adapter_tensors, base_tensors
from drl.model.trainer import Trainer


def trainer_of(*, lora: bool, ema: bool = False) -> Trainer:
    made = make_trainer(lora=lora)
    if ema:
        made.ema = Ema(
            dict(made.named_parameters()), EmaSettings(), models=(*made.models.values(),)
        )
    return made


def steps(trainer: Trainer, count: int, *, naps: bool = False) -> list[float]:
    """Train this many rollouts, with a nap after each; return the losses."""
    losses = []
    for _ in range(count):
        losses += [one.metrics["train/loss"] for one in trainer.train(make_shards(4, 1, steps=2))]
        if naps:
            trainer.sleep()
            trainer.wake()
    return losses


def places(trainer: Trainer, *, adapters: bool) -> set[int]:
    net = trainer.models["transformer"]
    chosen = adapter_tensors(net) if adapters else (tensor for _, tensor in base_tensors(net))
    return {tensor.data_ptr() for tensor in chosen}


@pytest.mark.parametrize(("lora", "ema"), [(False, False), (False, True), (True, True)])
def test_naps_change_no_bit_of_what_is_trained(lora: bool, ema: bool) -> None:
    awake, napping = (trainer_of(lora=lora, ema=ema) for _ in range(2))
    assert steps(awake, 3) == steps(napping, 3, naps=True)
    after = weights(napping)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(awake).items())
    for one, other in zip(
        awake.optimizer.state.values(), napping.optimizer.state.values(), strict=True
    ):
        assert all(torch.equal(one[key], other[key]) for key in one)
    if awake.ema is not None and napping.ema is not None:
        shadow = napping.ema.state()
        assert all(torch.equal(shadow[name], t) for name, t in awake.ema.state().items())


def test_everything_leaves_its_memory() -> None:
    trainer = trainer_of(lora=True, ema=True)
    steps(trainer, 1)
    assert trainer.ema is not None
    moments = [t for state in trainer.optimizer.state.values() for t in state.values()]
    shadow = list(trainer.ema.state().values())
    before = {t.data_ptr() for t in (*moments, *shadow)}
    base, own = places(trainer, adapters=False), places(trainer, adapters=True)
    trainer.sleep()
    assert not base & places(trainer, adapters=False)
    assert not own & places(trainer, adapters=True)
    assert not before & {t.data_ptr() for t in (*moments, *shadow)}
    assert all(p.grad is None for _, p in trainer.named_parameters())


def test_frozen_weights_stay_for_an_engine_that_computes_with_them() -> None:
    trainer = trainer_of(lora=True)
    base, own = places(trainer, adapters=False), places(trainer, adapters=True)
    trainer.sleep(frozen=False)
    assert places(trainer, adapters=False) == base
    assert not places(trainer, adapters=True) & own
    trainer.wake()
    assert places(trainer, adapters=False) == base


def test_without_adapters_there_are_no_frozen_weights_to_stay() -> None:
    trainer = trainer_of(lora=False)
    base = places(trainer, adapters=False)
    trainer.sleep(frozen=False)
    assert not places(trainer, adapters=False) & base


def test_parameters_stay_the_optimizers_and_a_second_call_is_harmless() -> None:
    trainer = trainer_of(lora=True)
    objects = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    trainer.wake()
    for _ in range(2):
        trainer.sleep()
    for _ in range(2):
        trainer.wake()
    now = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert all(one is other for one, other in zip(objects, now, strict=True))
    assert {id(p) for _, p in trainer.named_parameters()} == {id(p) for p in objects}


def test_a_save_during_sleep_is_the_save_of_before(tmp_path: Path) -> None:
    trainer = trainer_of(lora=False)
    steps(trainer, 1)
    folders = [tmp_path / name for name in ("awake", "asleep", "again")]
    for folder in folders:
        folder.mkdir()
    trainer.save(folders[0])
    (right,) = trainer.write_weights(tmp_path / "right")
    trainer.sleep()
    trainer.save(folders[1])
    trainer.begin_save(folders[2]).result()
    (file,) = trainer.write_weights(tmp_path / "model")
    ours, theirs = load_file(file), load_file(right)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for folder in folders:
        other = trainer_of(lora=False)
        other.restore(folder)
        held = weights(other)
        assert all(torch.equal(held[name], ours[name.partition(".")[2]]) for name in held)
        assert steps(other, 1) == pytest.approx(steps_from(folders[0]))


def steps_from(folder: Path) -> list[float]:
    other = trainer_of(lora=False)
    other.restore(folder)
    return steps(other, 1)


def test_a_sleeping_trainer_refuses_to_compute(tmp_path: Path) -> None:
    trainer = trainer_of(lora=True)
    tmp_path.joinpath("state").mkdir()
    trainer.save(tmp_path / "state")
    trainer.sleep()
    for work in (
        lambda: list(trainer.train(make_shards(2, 1))),
        lambda: trainer.replay(make_shards(2, 1)),
        lambda: trainer.restore(tmp_path / "state"),
    ):
        with pytest.raises(ContractError, match="the trainer sleeps; call wake"):
            work()
    trainer.wake()
    assert trainer.restore(tmp_path / "state") == 0
    assert len(list(trainer.train(make_shards(2, 1)))) == 1
