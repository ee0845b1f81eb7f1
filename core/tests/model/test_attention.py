"""The attention kernel: the one that was asked for, on this model alone, or a clear refusal."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from tiny_transformer import WRAP, adapted, gradients, largest_difference, predicted, transformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from drl.errors import BadInput
from drl.model.attention import check_attention_name, choose_attention, known_backends
from drl.model.compiled import Compilations, compile_blocks


def choose(module: nn.Module, backend: str | None) -> nn.Module:
    choose_attention("transformer", module, backend, device="cpu", dtype=torch.float32)
    return module


def dispatching() -> QwenImageTransformer2DModel:
    """A model whose attention goes through diffusers' dispatcher."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def kernels_of(module: Any) -> set[str]:
    chosen = [processor._attention_backend for processor in module.attn_processors.values()]
    return {str(getattr(one, "value", one)) for one in chosen}


def test_a_model_that_calls_torch_computes_with_the_kernel_asked_for() -> None:
    with torch.no_grad():
        default = predicted(transformer())
        with sdpa_kernel(SDPBackend.MATH):
            math = predicted(transformer())
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            flash = predicted(transformer())
        assert not torch.equal(math, flash), (
            "the kernels must differ for this test to tell them apart"
        )
        assert torch.equal(predicted(choose(transformer(), "_native_math")), math)
        assert torch.equal(predicted(choose(transformer(), "_native_flash")), flash)
        for left_alone in (None, "native"):
            assert torch.equal(predicted(choose(transformer(), left_alone)), default)
        # the choice belongs to one model: another one of the process has its default
        assert torch.equal(predicted(transformer()), default)


@pytest.mark.slow
def test_the_kernel_holds_in_the_backward_and_in_a_graph() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(adapted(transformer(layers=2)))
    model = choose(transformer(layers=2), "_native_math")
    assert largest_difference(gradients(adapted(model)), expected) == 0.0
    log = Compilations("trainer", "eager")
    compile_blocks(model, WRAP, log)
    assert largest_difference(gradients(model), expected) == 0.0
    assert (log.graphs, log.unexpected) == (2, 0)


def test_a_processor_keeps_its_signature() -> None:
    """Models ask for it to know which arguments they may pass."""
    plain, chosen = transformer(), choose(transformer(), "_native_math")
    before, after = (
        inspect.signature(model.transformer_blocks[0].attn.processor.__call__)
        for model in (plain, chosen)
    )
    assert before == after


def test_diffusers_dispatcher_is_told_and_the_process_is_as_before() -> None:
    model, other = dispatching(), dispatching()
    choose(model, "_native_math")
    assert kernels_of(model) == {"_native_math"}
    assert kernels_of(other) == {"None"}
    seen = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.scaled_dot_product_attention:
                seen.append(torch.backends.cuda.flash_sdp_enabled())
            return function(*args, **(kwargs or {}))

    query = torch.ones(1, 4, 2, 8)
    with Seen():
        dispatch_attention_fn(query, query, query)
    assert seen == [True], "without a choice of its own, a call has torch's"


@pytest.mark.parametrize("make", [transformer, dispatching])
@pytest.mark.parametrize("backend", ["flash", "sage", "xformers", "_native_cudnn"])
def test_a_kernel_that_cannot_run_here_is_refused_and_leaves_nothing_behind(
    make: Any, backend: str
) -> None:
    model = make()
    with pytest.raises(BadInput, match=f"train.attention_backend = '{backend}'"):
        choose(model, backend)
    if isinstance(model, QwenImageTransformer2DModel):
        assert kernels_of(model) == {"None"}


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"no attention backend 'nativ'; did you mean 'native'\?"):
        check_attention_name("nativ")
    assert known_backends() == sorted(name.value for name in AttentionBackendName)
    assert check_attention_name("_Native_Math") == "_native_math"
    assert check_attention_name(None) is None


def test_a_model_without_attention_of_diffusers_is_refused() -> None:
    with pytest.raises(BadInput, match=r"\(Linear\) has no attention"):
        choose(nn.Linear(1, 1), "native")
