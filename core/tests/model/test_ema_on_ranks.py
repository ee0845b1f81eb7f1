"""The moving average of sharded weights, on two gloo ranks: same values, same bits after a swap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gloo_ranks import spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from drl.model.ema import Ema, EmaSettings, local
from drl.model.optimizers import trainable_parameters
from drl.stages.sync import units

SETTINGS = EmaSettings(decay_init=0.5, decay_ramp=0.1, decay_max=0.9, decay_flat_steps=1)
STEPS = 3


class Block(nn.Module):
    """Odd sizes, so that shards are uneven and one rank holds nothing of the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(3, 2))


def train(model: nn.Module, ema: Ema, *, reference: bool) -> list[float]:
    """Take steps, average after each; with a reference pass between forward and backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    gaps = []
    for step in range(STEPS):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        output = model(x)
        if reference:
            with ema.swapped(), torch.no_grad():
                gaps.append((model(x) - output).abs().max().item())
        output.square().mean().backward()
        optimizer.step()
        ema.update()
    return gaps


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def alone(*, reference: bool) -> dict[str, torch.Tensor]:
    """Weights and shadow of one process without FSDP2."""
    model = blocks()
    ema = Ema(trainable_parameters({"c": model}), SETTINGS)
    train(model, ema, reference=reference)
    weights = {f"weights.{k}": v for k, v in whole(dict(model.named_parameters())).items()}
    return weights | {f"ema.{k}": v for k, v in whole(ema.state()).items()}


def worker(rank: int, world: int, folder: Path) -> None:
    assert world == 2
    (folder / f"rank{rank}.json").write_text(json.dumps(checked(rank)))


def sharded(shape: tuple[int, ...] = (2,)) -> tuple[nn.Sequential, Ema]:
    """Shards over 2 ranks, or copies on 2 ranks of the only shard."""
    model = blocks()
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (model[0], model[1], model):
        fully_shard(part, mesh=mesh)
    return model, Ema(trainable_parameters({"c": model}), SETTINGS, models=(model,))


def pushed_stays(pair: tuple[nn.Module, Ema]) -> bool:
    """True when what was gathered of the shadow is the shadow still when the weights are back."""
    model, ema = pair
    with torch.no_grad():
        for parameter in ema.parameters.values():
            local(parameter).add_(1)
    shadow = whole(ema.state())
    with ema.swapped():
        pushed = [tensor for unit in units("dense", model) for tensor in unit]
    return all(torch.equal(tensor, shadow[f"c.{name}"]) for name, tensor in pushed)


def checked(rank: int) -> dict[str, object]:
    """Everything that the test asserts, as facts of this rank."""
    facts: dict[str, object] = {}
    for reference in (False, True):
        model, ema = sharded()
        gaps = train(model, ema, reference=reference)
        expected = alone(reference=reference)
        weights = {f"weights.{k}": v for k, v in whole(dict(model.named_parameters())).items()}
        got = weights | {f"ema.{k}": v for k, v in whole(ema.state()).items()}
        facts[f"names {reference}"] = got.keys() == expected.keys()
        facts[f"error {reference}"] = max(
            (got[name] - tensor).abs().max().item() for name, tensor in expected.items()
        )
    facts["gaps"] = gaps
    facts["distance"] = ema.distance().item()
    before = {name: local(p.detach()).clone() for name, p in ema.parameters.items()}
    held = [id(p) for p in model.parameters()]
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        live = model(x)  # the root stays gathered after it
        with ema.swapped():
            averaged = model(x)
        again = model(x)
    plain = blocks()
    plain.load_state_dict({k.removeprefix("c."): v for k, v in whole(ema.state()).items()})
    facts["shadow is used"] = bool((averaged - plain(x)).abs().max() < 1e-6)
    facts["weights are back"] = torch.equal(live, again) and not torch.equal(live, averaged)
    try:
        with ema.swapped():
            model(x)
            raise KeyError(rank)
    except KeyError:
        pass
    for part in model.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    facts["bits are back"] = all(
        torch.equal(local(p.detach()), before[name]) for name, p in ema.parameters.items()
    )
    facts["pushed stays"] = [pushed_stays(sharded((2,))), pushed_stays(sharded((2, 1)))]
    facts["objects are the same"] = [id(p) for p in model.parameters()] == held
    facts["empty shard"] = any(local(t).numel() == 0 for t in ema.state().values())
    return facts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(worker, 2, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_average_what_one_averages(ranks: list[dict[str, object]]) -> None:
    for facts in ranks:
        for reference in (False, True):
            assert facts[f"names {reference}"]
            assert facts[f"error {reference}"] < 2e-6  # gradients are added up in another order


def test_the_reference_pass_of_sharded_weights_uses_the_shadow(ranks) -> None:
    for facts in ranks:
        first, *others = facts["gaps"]
        assert first == 0.0  # the shadow starts as the weights
        assert all(gap > 1e-3 for gap in others)
        assert facts["shadow is used"]


def test_sharded_weights_come_back_to_the_bit_and_gathered_ones_are_dropped(ranks) -> None:
    for facts in ranks:
        assert facts["weights are back"]
        assert facts["bits are back"]
        assert facts["objects are the same"]


def test_the_distance_is_that_of_all_ranks_also_of_one_that_holds_nothing(ranks) -> None:
    assert ranks[0]["distance"] == ranks[1]["distance"] > 0
    assert ranks[1]["empty shard"]


def test_what_was_gathered_for_engines_is_the_shadow_when_the_weights_are_back(ranks) -> None:
    assert [facts["pushed stays"] for facts in ranks] == [[True, True]] * 2
