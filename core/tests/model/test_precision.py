"""Dtypes of parameters: the frozen base in the forward's, single modules in their own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_transformer import adapted, gradients, predicted, transformer
from torch import nn
from torch.overrides import TorchFunctionMode

from drl.errors import BadInput
from drl.lora import adapter_state, merged_state
from drl.model.compiled import Compilations, compile_blocks
from drl.model.precision import (
    NONE,
    OwnDtype,
    check_matched,
    compute_in,
    find_overrides,
    joined_globs,
    overridden_tables,
    own_dtype_class,
    plain_names,
    store_frozen,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def dtypes_of(module: nn.Module, part: str = "") -> set[torch.dtype]:
    return {p.dtype for name, p in module.named_parameters() if part in name}


class TestTheFrozenBase:
    @pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("fp16", FP16), ("fp32", FP32)])
    def test_is_kept_in_the_forward_dtype_and_nothing_else_is(
        self, name: str, dtype: torch.dtype
    ) -> None:
        model = adapted(transformer(), bias="lora_only", modules_to_save=("norm1.linear",))
        trained = {key: p.clone() for key, p in model.named_parameters() if p.requires_grad}
        identities = {key: id(p) for key, p in model.named_parameters()}
        store_frozen(model, name)
        for key, parameter in model.named_parameters():
            assert parameter.dtype == (FP32 if parameter.requires_grad else dtype), key
            assert id(parameter) == identities[key], "others hold the parameter by then"
        assert all(torch.equal(model.get_parameter(key), old) for key, old in trained.items())
        assert model.pos_embed.pos_embed.dtype == FP32, "position tables are exact"

    def test_gives_the_bits_of_masters_that_autocast_rounds(self) -> None:
        """A Linear under autocast rounds its weight at each call: rounding it once changes nothing."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.Linear(8, 8).requires_grad_(False)
            x = torch.randn(3, 8)
        with torch.autocast("cpu", BF16):
            before = layer(x)
            store_frozen(layer, "bf16")
            assert torch.equal(layer(x), before)

    def test_does_not_touch_frozen_adapters_or_what_trains_in_full(self) -> None:
        model = adapted(transformer(), modules_to_save=("norm1.linear",)).requires_grad_(False)
        store_frozen(model, "bf16")
        assert dtypes_of(model, "lora_") == dtypes_of(model, "modules_to_save") == {FP32}
        assert dtypes_of(model, "proj_out") == {BF16}
        full = transformer()
        full.proj_out.requires_grad_(False)
        store_frozen(full, "bf16")
        assert dtypes_of(full, "proj_out") == {BF16}
        assert dtypes_of(full.transformer_blocks) == {FP32}

    @pytest.mark.parametrize("init", ["pissa", "olora"])
    def test_start_values_from_the_base_are_those_of_the_exact_base(self, init: str) -> None:
        """They are made at injection; what they subtract stays float32."""
        model = adapted(transformer(), init=init)
        exact = {key: value.clone() for key, value in model.named_buffers()}
        pairs = adapter_state(model)
        store_frozen(model, "bf16")
        assert all(torch.equal(value, exact[key]) for key, value in model.named_buffers())
        after = adapter_state(model)
        assert all(torch.equal(after[key], value) for key, value in pairs.items())
        # product less its start is 0: the merged weight is the rounded base
        base = dict(transformer().named_parameters())
        merged = dict(merged_state(model))
        key = "transformer_blocks.0.attn.to_q.weight"
        torch.testing.assert_close(merged[key], base[key].bfloat16(), rtol=0.01, atol=1e-5)

    def test_gradients_stay_close_to_those_over_masters(self) -> None:
        right = gradients(adapted(transformer()), BF16)
        model = adapted(transformer())
        store_frozen(model, "bf16")
        for key, gradient in gradients(model, BF16).items():
            assert gradient.dtype == FP32
            scale = right[key].norm().item()
            assert (gradient - right[key]).norm().item() < 0.05 * scale + 1e-4, key


class TestGlobs:
    def test_a_later_one_wins_and_the_recipe_comes_after_the_family(self) -> None:
        assert list(joined_globs([("a", "fp32"), ("b", "bf16")], [("a", "fp16")]).items()) == [
            ("b", "bf16"),
            ("a", "fp16"),
        ]
        globs = {"*.norm1.linear.*": "fp32", "transformer_blocks.0.*": "fp16"}
        found = find_overrides("transformer", transformer(), globs, "bf16").dtypes
        assert found["transformer_blocks.0.norm1.linear.weight"] == FP16
        assert found["transformer_blocks.1.norm1.linear.bias"] == FP32
        assert "transformer_blocks.1.attn.to_q.weight" not in found

    def test_the_forward_dtype_compiles_to_nothing(self) -> None:
        found = find_overrides("transformer", transformer(), {"*": "bf16"}, "bf16")
        assert found == NONE
        exempt = {"*.attn.*": "fp32", "*": "bf16"}
        assert find_overrides("transformer", transformer(), exempt, "bf16") == NONE

    def test_names_are_those_of_the_model_without_adapters(self) -> None:
        plain, model = transformer(), adapted(transformer(), modules_to_save=("norm1.linear",))
        names = plain_names(model)
        assert set(names.values()) == {key for key, _ in plain.named_parameters()}
        assert not any("lora_" in key for key in names)
        found = find_overrides(
            "transformer", model, {"transformer_blocks.0.*": "fp32"}, "bf16"
        ).dtypes
        assert "transformer_blocks.0.attn.to_q.base_layer.weight" in found
        copy = "transformer_blocks.0.norm1.linear.modules_to_save.default.weight"
        assert copy in found, "a trained copy follows its original"

    def test_matching_respects_case_and_nothing_matched_is_told_with_near_names(self) -> None:
        model = transformer()
        found = find_overrides("transformer", model, {"PROJ_OUT.*": "fp32"}, "bf16")
        assert found.unmatched == ("PROJ_OUT.*",)
        with pytest.raises(BadInput) as caught:
            check_matched({"transformer": model}, ("proj_out.weigth",))
        text = str(caught.value)
        assert "'proj_out.weigth' matches no parameter of transformer" in text
        assert "did you mean 'proj_out.weight'?" in text

    def test_half_a_module_is_refused_with_the_glob_that_covers_it(self) -> None:
        with pytest.raises(BadInput) as caught:
            find_overrides("transformer", transformer(), {"proj_out.weight": "fp32"}, "bf16")
        text = str(caught.value)
        assert "transformer.proj_out would have parameters of different dtypes" in text
        assert "proj_out.weight: float32, proj_out.bias: the forward's" in text
        assert "'proj_out.*'" in text


def prepared(
    model: Any, globs: dict[str, str], forward: str = "bf16", *, store: bool = True
) -> Any:
    found = find_overrides("transformer", model, globs, forward)
    if store:
        store_frozen(model, forward, found)
    compute_in("transformer", model, found, forward)
    return model


class TestModulesWithADtypeOfTheirOwn:
    def seen(self, model: nn.Module, name: str, autocast: torch.dtype | None) -> list[torch.dtype]:
        """What a module gets, what its product gets and gives, and what it gives."""
        module, dtypes = model.get_submodule(name), []
        weight = module.weight

        class Products(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                output = function(*args, **(kwargs or {}))
                if function is torch.nn.functional.linear and args[1] is weight:
                    dtypes.extend([args[0].dtype, output.dtype])
                return output

        before = module.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        after = module.register_forward_hook(lambda *given: dtypes.append(given[2].dtype))
        with Products():
            predicted(model, autocast)
        before.remove()
        after.remove()
        return dtypes

    def test_compute_in_float32_between_casts_with_autocast_off(self) -> None:
        model = prepared(adapted(transformer()), {"transformer_blocks.1.ff.net.2.*": "fp32"})
        layer = model.transformer_blocks[1].ff.net[2]
        assert dtypes_of(layer) == {FP32}
        got, inside_in, inside_out, given = self.seen(model, "transformer_blocks.1.ff.net.2", BF16)
        assert (got, inside_in, inside_out, given) == (BF16, FP32, FP32, BF16)

    def test_are_exact_where_the_forward_is_rounded(self) -> None:
        """By hand: 1 + 2^-10 is not a bf16 number, so only a float32 layer sees the small part."""
        layer = nn.Sequential(nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            layer[0].weight.fill_(1 + 2**-10)
        layer.requires_grad_(False)
        x = torch.tensor([[512.0]])
        with torch.autocast("cpu", BF16):
            rounded = layer(x)
        layer[0].__class__ = own_dtype_class(nn.Linear, FP32, FP32)
        with torch.autocast("cpu", BF16):
            exact = layer(x)
        assert rounded.item() == 512.0
        assert exact.item() == 512.5

    def test_a_trained_master_is_cast_for_a_narrower_dtype(self) -> None:
        model = transformer()
        prepared(model, {"proj_out.*": "bf16"}, "fp32", store=False)
        assert dtypes_of(model.proj_out) == {FP32}, "masters stay masters"
        assert self.seen(model, "proj_out", None) == [FP32, BF16, BF16, FP32]
        found = gradients(model)
        assert found["proj_out.weight"].dtype == FP32
        assert found["proj_out.weight"].abs().max() > 0

    def test_a_master_that_is_too_narrow_is_refused(self) -> None:
        model = transformer().to(BF16)
        with pytest.raises(BadInput, match=r"proj_out.weight is trained and stored in bfloat16"):
            prepared(model, {"proj_out.*": "fp32"}, store=False)
        prepared(model.requires_grad_(False), {"proj_out.*": "fp32"})

    def test_an_adapted_layer_keeps_its_adapter_in_its_own(self) -> None:
        model = prepared(adapted(transformer()), {"*.attn.to_q.*": "fp32"})
        layer = model.transformer_blocks[0].attn.to_q
        assert isinstance(layer.base_layer, OwnDtype)
        assert layer.base_layer.weight.dtype == FP32
        found = gradients(model, BF16)
        assert found["transformer_blocks.0.attn.to_q.lora_B.default.weight"].abs().max() > 0

    def test_alike_modules_have_one_class_so_that_alike_blocks_share_a_graph(self) -> None:
        model = prepared(transformer(layers=3), {"*.norm1.linear.*": "fp32"}, store=False)
        first, second, last = (block.norm1.linear for block in model.transformer_blocks)
        assert type(first) is type(second) is type(last)
        assert isinstance(first, OwnDtype)
        assert isinstance(first, nn.Linear)
        assert type(first).__name__ == "Linear"
        copy = deepcopy(model).transformer_blocks[0].norm1.linear
        assert type(copy) is type(first)
        log = Compilations("engine", "eager")
        net = nn.Sequential(Two(first), Two(second))
        compile_blocks(net, ("Two",), log)
        with torch.no_grad():
            for two in net:
                two(torch.zeros(1, first.in_features))
        assert (log.graphs, log.unexpected) == (1, 0)


class Two(nn.Module):
    """A block around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Modulated(nn.Module):
    """A table beside a layer, as in blocks with a ``scale_shift_table``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((2, 4), 1 + 2**-10))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table


def test_a_table_beside_layers_keeps_its_dtype_and_the_layers_theirs() -> None:
    model = nn.Sequential(Modulated()).requires_grad_(False)
    found = find_overrides("transformer", model, {"0.table": "fp32"}, "bf16")
    store_frozen(model, "bf16", found)
    compute_in("transformer", model, found, "bf16")
    assert model[0].table.dtype == FP32
    assert model[0].layer.weight.dtype == BF16
    assert overridden_tables(model, found) == ["0.table"]
    with torch.autocast("cpu", BF16):
        assert model(torch.zeros(2, 4)).dtype == FP32, "adding the table promotes"
