"""Evaluation mode by flags: the same modules in the same mode as by ``eval`` and ``train``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drl.stages.mode import EvaluationModes


class Stubborn(nn.Linear):
    """Stays in evaluation mode, as frozen normalisations do."""

    def train(self, mode: bool = True) -> Stubborn:
        super().train(False)
        return self


class Block(nn.Module):
    """A matrix and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.matrix(x))
        return dropped


def model(*more: nn.Module) -> nn.Module:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    return nn.Sequential(inner, nn.Dropout(0.9), *more)


def modes(module: nn.Module) -> list[bool]:
    return [child.training for child in module.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_every_module_is_in_the_mode_and_back(training: bool) -> None:
    made = model().train(training)
    evaluation = EvaluationModes({"transformer": made})
    for _ in range(2):
        with evaluation("transformer"):
            assert modes(made) == [False] * 6
        assert modes(made) == [training] * 6


def test_dropout_is_off_inside_and_on_outside() -> None:
    made = nn.Dropout(0.5).train()
    x = torch.ones(1000)
    evaluation = EvaluationModes({"a": made})
    with evaluation("a"):
        assert torch.equal(made(x), x)
    assert not torch.equal(made(x), x)


def test_only_the_named_component_changes() -> None:
    models = {"a": model(), "b": model()}
    with EvaluationModes(models)("a"):
        assert not any(modes(models["a"]))
        assert all(modes(models["b"]))


def test_a_module_with_a_way_of_its_own_is_asked() -> None:
    """As ``train`` would: the others come back, this one stays."""
    made = model(Stubborn(3, 3)).train()
    before = modes(made)
    assert before == [True] * 6 + [False]
    with EvaluationModes({"a": made})("a"):
        assert not any(modes(made))
    assert modes(made) == before


def test_the_mode_comes_back_after_an_error() -> None:
    made = model().train()
    with pytest.raises(RuntimeError, match="in the pass"), EvaluationModes({"a": made})("a"):
        raise RuntimeError("in the pass")
    assert all(modes(made))


def test_the_flag_is_an_ordinary_attribute() -> None:
    """No buffer, no parameter, nothing in the state: what Module itself would have set."""
    made = model()
    with EvaluationModes({"a": made})("a"):
        assert made.__dict__["training"] is False
    assert set(made.state_dict()) == set(model().state_dict())
    assert made.eval().training is False


def test_a_compiled_block_sees_the_mode() -> None:
    """Its guards read the flag: another graph in evaluation mode, the first one again afterwards."""
    made = Block().train()
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(len(graphs))
        return graph

    made.compile(backend=counting, fullgraph=True, dynamic=False)
    evaluation = EvaluationModes({"a": made})
    x = torch.ones(4, 64)
    for _ in range(2):
        assert (made(x) == 0).any(), "dropped"
        with evaluation("a"), torch.no_grad():
            assert torch.equal(made(x), made.matrix(x))
    assert len(graphs) == 2
