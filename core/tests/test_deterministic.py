"""Deterministic mode of a process: what is switched, that it comes back, flash attention, errors."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.config.environment import training_environment
from drl.deterministic import (
    DISPATCH,
    determinism,
    deterministic_compilation,
    deterministic_kernels,
    explained,
    make_deterministic,
)
from drl.errors import BadInput, DrlError, EngineError
from drl.model.compiled import Compilations, compile_blocks

FLASH = """
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    deterministic=False, return_attn_probs=False):
    CALLS.append(deterministic)
    return q
def flash_attn_varlen_func(q, k, v):
    return q
CALLS = []
"""


def recipe_with(deterministic: bool = True, backend: str | None = None, **env: str) -> Any:
    train = SimpleNamespace(deterministic=deterministic, attention_backend=backend, env=env)
    return SimpleNamespace(train=train)


def state() -> tuple[object, ...]:
    import torch._inductor.config as settings

    return (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.deterministic,
    )


def scatter() -> None:
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.fixture
def flash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of a flash attention, as diffusers would have found it."""
    (tmp_path / "acme_flash.py").write_text(FLASH)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("acme_flash")
    names = vars(importlib.import_module(DISPATCH))
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setitem(names, name, vars(module)[name])
    yield module
    del sys.modules["acme_flash"]


def test_switches_are_on_within_and_as_before_after() -> None:
    torch.backends.cudnn.benchmark = True
    before = state()
    assert before == (False, True, False, False, False)
    with determinism(recipe_with()):
        assert state() == (True, False, True, False, True)
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
            scatter()
    assert state() == before
    torch.backends.cudnn.benchmark = False
    scatter()


def test_a_user_who_only_wanted_warnings_has_them_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with determinism(recipe_with()):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_touched_where_it_is_off() -> None:
    before = state()
    with determinism(recipe_with(deterministic=False, backend="sage")) as variables:
        assert state() == before
        assert variables == {}
    make_deterministic(recipe_with(deterministic=False, backend="sage"))
    assert state() == before


def test_switches_come_back_after_a_failure_too() -> None:
    before = state()
    with pytest.raises(KeyError), determinism(recipe_with()):
        raise KeyError("of the run")
    assert state() == before


def test_variables_are_set_where_nobody_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_DETERMINISTIC", "1")
    recipe = recipe_with(TORCHINDUCTOR_DETERMINISTIC="1")
    with determinism(recipe) as variables, training_environment(variables):
        assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_the_compiler_is_set_in_whatever_thread_compiles() -> None:
    import torch._inductor.config as settings

    seen: list[bool] = []

    def compile_something() -> None:
        with deterministic_compilation():
            seen.append(bool(settings.deterministic))

    with determinism(recipe_with()):
        thread = threading.Thread(target=compile_something)
        thread.start()
        thread.join()
    compile_something()
    assert seen == [True, False]


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_blocks_of_a_model_are_compiled_without_measuring() -> None:
    import torch._inductor.config as settings

    seen: list[bool] = []
    log = Compilations("trainer", backend="eager")

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(bool(settings.deterministic))
        return graph.forward

    log._compiler = compiler
    model = torch.nn.Sequential(Twice())
    compile_blocks(model, ("Twice",), log)
    with determinism(recipe_with()):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seen == [True, False], "torch guards its graphs by its own switch"


def test_a_rank_stays_deterministic_when_nobody_holds_the_context() -> None:
    import torch._inductor.config as settings

    before = state()
    try:
        make_deterministic(recipe_with())
        gc.collect()
        assert state() == (True, False, True, False, True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        settings.deterministic = False
    assert state() == before


def test_an_operator_without_such_a_kernel_is_named_with_what_to_do() -> None:
    with pytest.raises(DrlError) as caught, determinism(recipe_with()):
        scatter()
    text = str(caught.value)
    assert "the operator put_ has no deterministic kernel" in text
    assert "train.deterministic = false" in text
    assert caught.value.exit_code == 1


def test_it_is_named_through_what_an_engine_or_a_stage_made_of_it() -> None:
    def wrapped() -> None:
        try:
            scatter()
        except RuntimeError as error:
            told = EngineError("the batch failed")
            told.add_note("go on with --resume")
            raise told from error

    with pytest.raises(DrlError, match="operator put_") as caught, determinism(recipe_with()):
        wrapped()
    assert caught.value.__notes__ == ["go on with --resume"]
    assert isinstance(caught.value.__cause__, EngineError)


def test_other_errors_stay_what_they_are() -> None:
    error = BadInput("does not have a name")
    assert explained(error) is error
    first = ValueError("a")
    second = ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert explained(first) is first


def test_flash_attention_is_always_called_deterministic(flash: Any) -> None:
    names = vars(importlib.import_module(DISPATCH))
    given = names["flash_attn_func"]
    with closing(deterministic_kernels("FLASH")):
        names["flash_attn_func"]("q", "k", v="v", causal=True)
        names["flash_attn_func"]("q", "k", "v", deterministic=False)
        assert names["flash_attn_func"].__name__ == "flash_attn_func"
    names["flash_attn_func"]("q", "k", "v")
    assert flash.CALLS == [True, True, False]
    assert names["flash_attn_func"] is given


def test_a_package_without_the_argument_is_refused_before_anything_changes(flash: Any) -> None:
    before = state()
    with pytest.raises(BadInput) as caught, determinism(recipe_with(backend="flash_varlen")):
        raise AssertionError("never here")
    text = str(caught.value)
    assert "flash_attn_varlen_func of acme_flash takes (q, k, v) and no 'deterministic'" in text
    assert state() == before


def test_a_package_that_is_not_there_is_refused_with_what_is(flash: Any) -> None:
    with pytest.raises(BadInput) as caught, determinism(recipe_with(backend="_flash_3")):
        raise AssertionError("never here")
    assert "flash_attn_3_func is not installed here" in str(caught.value)
    assert "installed: flash, flash_varlen" in str(caught.value)


def test_an_entry_point_that_tells_no_arguments_is_refused(flash: Any, monkeypatch: Any) -> None:
    names = vars(importlib.import_module(DISPATCH))
    monkeypatch.setitem(names, "flash_attn_func", dict.fromkeys)
    with pytest.raises(BadInput, match="no 'deterministic'"):
        deterministic_kernels("flash")


@pytest.mark.slow
def test_diffusers_itself_calls_a_flash_package_deterministic(tmp_path: Path) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(FLASH)
    (package / "flash_attn_interface.py").write_text(
        "_wrapped_flash_attn_backward = _wrapped_flash_attn_forward = None\n"
    )
    facts = tmp_path / "flash_attn-2.8.3.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n")
    code = (
        "import torch, flash_attn\n"
        "from diffusers.models.attention_dispatch import _flash_attention\n"
        "from drl.deterministic import deterministic_kernels\n"
        "x = torch.zeros(1, 2, 1, 4)\n"
        "with deterministic_kernels('flash'): _flash_attention(x, x, x)\n"
        "_flash_attention(x, x, x)\n"
        "assert flash_attn.CALLS == [True, False], flash_attn.CALLS"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "DIFFUSERS_ATTN_CHECKS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class Gelu(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.layer(x))


def test_a_backward_pass_is_compiled_where_the_settings_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first call comes from a thread of autograd on a GPU, whose settings are the defaults."""
    import torch._inductor.config as settings
    from torch._inductor.graph import GraphLowering

    seen: list[tuple[bool, bool]] = []
    begin = GraphLowering.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        seen.append((self.is_backward, bool(settings.deterministic)))

    monkeypatch.setattr(GraphLowering, "__init__", noted)
    model = torch.nn.Sequential(Gelu())
    with determinism(recipe_with()), settings.patch({"fx_graph_cache": False}):
        compile_blocks(model, ("Gelu",), Compilations("test"))
        loss = model(torch.randn(2, 3)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert seen == [(False, True), (True, True)]
