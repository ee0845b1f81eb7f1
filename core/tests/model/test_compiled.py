"""Compiled blocks: few graphs for many blocks, the same numbers, and no recompilation unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from ranked_trainer import WIDTH, make_net
from tiny_transformer import WRAP, adapted, gradients, largest_difference, predicted, transformer
from torch import nn

from drl.errors import BadInput
from drl.lora import adapter_off
from drl.model.compiled import SHAPES_PER_KIND, Compilations, compile_blocks, outermost
from drl.model.precision import store_frozen

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Leave no graph behind: they would be tried by whatever compiles next."""
    yield
    torch._dynamo.reset()


def compiled(
    model: Any, label: str = "trainer", backend: str = "aot_eager"
) -> tuple[Any, Compilations]:
    log = Compilations(label, backend)
    compile_blocks(model, (*WRAP, "Block"), log)
    return model, log


def small(label: str = "trainer") -> tuple[nn.Module, Compilations]:
    """Two alike blocks with adapters, traced but not lowered: graphs that cost little."""
    return compiled(make_net(lora=True), label, "eager")


def rows(count: int = 2) -> torch.Tensor:
    return torch.linspace(-1, 1, count * WIDTH).reshape(count, WIDTH)


@pytest.mark.slow
def test_alike_blocks_share_a_graph_and_give_the_same_gradients() -> None:
    expected = gradients(adapted(transformer()))
    model, log = compiled(adapted(transformer()))
    assert largest_difference(gradients(model), expected) < 1e-5
    # the first block's input needs no gradient, the second one's does; then a third kind, and the last
    assert (log.graphs, log.unexpected) == (4, 0)
    assert largest_difference(gradients(model), expected) < 1e-5
    assert log.graphs == 4, "fixed shapes compile once"


def test_a_transformer_block_with_adapters_under_autocast_is_one_graph() -> None:
    model = adapted(transformer(layers=1), bias="all", modules_to_save=("norm1.linear",))
    store_frozen(model, "bf16")
    with torch.no_grad():
        expected = predicted(model, BF16)
        model, log = compiled(model)
        assert log.graphs == 0, "nothing is computed before the first call"
        torch.testing.assert_close(predicted(model, BF16), expected, rtol=0.02, atol=0.02)
    # two attentions, adapters, trained biases, a trained copy: a break of the graph would have raised
    assert (log.graphs, log.unexpected) == (1, 0)
    assert log.seconds > 0


def test_what_an_ordinary_run_does_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    model, log = small()
    found = []
    with caplog.at_level(logging.WARNING, "drl.model.compiled"):
        for _ in range(2):
            model.train()
            model(rows()).sum().backward()
            model.eval()
            with torch.no_grad():
                model(rows())  # the replay
                with adapter_off(model):
                    model(rows())  # the reference
                model(rows(5))  # an evaluation with other rows
            model.train()
            model(rows()).sum().backward()
            found.append(log.graphs)
    # training: input without and with gradient; then replay, reference, evaluation: one each
    assert found == [5, 5]
    assert log.unexpected == 0
    assert not caplog.records


class Wobbly(nn.Module):
    """A block with a number that changes: each value is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


def test_a_storm_of_graphs_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, log = nn.Sequential(Wobbly()), Compilations("engine", "eager")
    assert compile_blocks(model, ("Wobbly",), log) == 1
    extra = 3
    with caplog.at_level(logging.WARNING, "drl.model.compiled"):
        for value in range(SHAPES_PER_KIND + extra):
            model[0].factor = 2.0 + value
            model(torch.ones(2, 3))
    assert log.graphs == SHAPES_PER_KIND + extra, "torch's limit of 8 graphs must not stop it"
    assert log.unexpected == extra
    (record,) = caplog.records
    assert record.getMessage().startswith("engine: a compiled block was compiled again as number 9")
    assert "TORCH_LOGS=recompiles" in record.getMessage()


def test_an_equal_graph_is_unexpected_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model, log = small()
    with torch.no_grad():
        model(rows())
        assert (log.graphs, log.unexpected) == (1, 0)
        torch._dynamo.reset()  # as if a guard had failed that no shape explains
        model(rows())
    assert (log.graphs, log.unexpected) == (2, 1)
    assert "although an equal graph exists" in caplog.text


def test_news_are_what_came_since_the_last_time() -> None:
    model, log = small()
    with torch.no_grad():
        model(rows())
        assert log.news() == {"train/compiled_graphs": 1.0, "train/recompilations": 0.0}
        model(rows())
        assert log.news() == {"train/compiled_graphs": 0.0, "train/recompilations": 0.0}
        torch._dynamo.reset()
        model(rows())
    assert log.news() == {"train/compiled_graphs": 1.0, "train/recompilations": 1.0}


def test_another_thread_computes_with_its_own_model_and_its_own_count() -> None:
    trainer, trained = small()
    engine, sampled = small("engine")
    found = []

    def sample() -> None:
        with torch.no_grad():
            found.append(engine(rows()))

    thread = Thread(target=sample)
    thread.start()
    trainer(rows()).sum().backward()
    thread.join()
    with torch.no_grad():
        torch.testing.assert_close(found[0], make_net(lora=True)(rows()))
    assert (trained.graphs, sampled.graphs) == (2, 1)
    assert trained.unexpected == sampled.unexpected == 0


def test_a_model_without_such_blocks_is_refused_with_what_it_has() -> None:
    log = Compilations("trainer", "aot_eager")
    with pytest.raises(BadInput, match=r"no module of class Absent, .*JointTransformerBlock"):
        compile_blocks(transformer(), ("Absent",), log)
    with pytest.raises(BadInput, match=r"\(none\)"):
        compile_blocks(transformer(), (), log)


def test_a_block_that_cannot_be_one_graph_raises_instead_of_running_eagerly() -> None:
    class Prints(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    model, log = nn.Sequential(Prints()), Compilations("trainer", "eager")
    compile_blocks(model, ("Prints",), log)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        model(torch.ones(2))


def test_a_block_inside_a_block_is_compiled_with_it() -> None:
    inner = nn.Sequential(Wobbly())
    outer = nn.ModuleDict({"a": nn.Sequential(inner), "b": Wobbly()})
    assert outermost(outer, ("Sequential", "Wobbly")) == [outer["a"], outer["b"]]
    assert outermost(outer, ("Wobbly",)) == [inner[0], outer["b"]]


@pytest.mark.slow
def test_the_compiler_of_a_real_run_computes_the_same() -> None:
    """Inductor, which writes and compiles C++ here."""
    expected = gradients(adapted(transformer()))
    model = adapted(transformer())
    compile_blocks(model, WRAP, log := Compilations("trainer"))
    assert largest_difference(gradients(model), expected) < 1e-4
    assert (log.graphs, log.unexpected) == (4, 0)
