"""Base plus adapter as one weight, with a single rounding (lora.md 2.4).

PEFT rounds the delta to bf16, then adds in bf16. Here product, scale and sum are float32 and only
the result is rounded. Merging always starts from the untouched base: adding and subtracting in low
precision drifts over many weight pushes. ``merged_state`` never writes to the model, and ``merge``
keeps what it replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from drl.lora.errors import LoraError
from drl.lora.layer import LoraLayer, bias_owner
from drl.lora.naming import to_plain_name
from drl.lora.sharding import copy_into, full_tensor
from drl.lora.switches import BiasSwitch, SavedModule
from drl.lora.switching import check_adapters
from drl.lora.tree import base_names, hosts, lora_layers


def merge_delta(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``W + scale * B A`` [out, in] in W's dtype, computed in float32 and rounded once.

    W [out, in], A [rank, in], B [out, rank], any floating dtypes, on one device. A new tensor; the
    arguments are left alone. Autocast and TF32 are off inside, as both would round the product.
    """
    return _merged(W, [(A, B, scale)])


def merged_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of every parameter and buffer of the model with adapters merged in.

    What is merged is what the model computes with now: its active adapters, with their biases and
    saved modules. Names and order are those of the model's ``state_dict`` before ``inject``. Only
    one merged weight is alive at a time, if the caller drops it; tensors without adapter share
    memory with the model. Sharded tensors are gathered one by one, so under FSDP2 every rank must
    drain this in step. Raises ``LoraError`` for a target weight that another module uses too: after
    merging the two would differ.
    """
    check_untied(module)
    layers = {f"{fqn}.weight": layer for fqn, layer in lora_layers(module).items()}
    replaced = _replacements(module)
    state = module.state_dict()
    for key, name in base_names(module).items():
        layer = layers.get(name)
        if name in replaced:
            yield name, full_tensor(replaced[name])
        elif layer is not None and key.endswith(".base_layer.weight"):
            yield (
                name,
                full_tensor(state[key]) if layer.merged else _merged_weight(layer, layer.active),
            )
        else:
            yield name, full_tensor(state[key])


def merge(module: nn.Module, *names: str) -> tuple[str, ...]:
    """Write adapters (default: the active ones) into the base weights, in place.

    What was there is kept, and ``unmerge`` restores it bit for bit. Merging what is merged already
    changes nothing; a further adapter is added to those merged before, always starting from the
    pristine base. While anything is merged the layers compute with their weight alone, and the
    merged adapters are the active ones. Returns their names in order. Saved modules are switched,
    not merged. Under sharding every rank calls this. Raises ``LoraError`` for a name that the model
    lacks, for tied weights and for a result that is not finite; then nothing is merged.
    """
    layers = lora_layers(module)
    before = next((layer.merged for layer in layers.values() if layer.merged), ())
    active = next((host.active for _, host in hosts(module) if host.active), ())
    order = tuple(dict.fromkeys((*before, *(names or active))))
    found = check_adapters(module, order)
    check_untied(module)
    if order == before:
        return before
    try:
        for fqn, layer in layers.items():
            _write(fqn, layer, order)
    except BaseException:
        unmerge(module)
        raise
    for _, host in found:
        host.active = order
    return order


def unmerge(module: nn.Module) -> None:
    """Put the base weights back as they were before ``merge``, bit for bit."""
    with torch.no_grad():
        for layer in lora_layers(module).values():
            for part, tensor in layer.pristine.items():
                layer.base_layer.get_parameter(part).copy_(tensor)
            layer.pristine, layer.merged = {}, ()


def _write(fqn: str, layer: LoraLayer, names: tuple[str, ...]) -> None:
    W = _merged_weight(layer, names)
    if not torch.isfinite(W).all():
        raise LoraError(f"the merged weight of {fqn} is not finite; nothing is merged")
    base = layer.base_layer
    owner = bias_owner(names, layer.lora_bias)
    with torch.no_grad():
        for part, parameter in base.named_parameters(recurse=False):
            layer.pristine.setdefault(part, parameter.detach().clone())
        copy_into(base.get_parameter("weight"), W)
        if owner is not None:
            base.get_parameter("bias").copy_(layer.lora_bias[owner])
    layer.merged = names


@torch.no_grad()
def _merged_weight(layer: LoraLayer, names: Sequence[str]) -> torch.Tensor:
    """Return the pristine weight plus the updates of these adapters, whole."""
    W = full_tensor(layer.pristine.get("weight", layer.weight))
    pairs = []
    for name in names:
        if name not in layer.settings:
            continue
        scale = layer.settings[name].scale
        A, B = (full_tensor(factor) for factor in layer.factors(name))
        pairs.append((*layer.flat(A, B), scale))
        if name in layer.lora_start:
            pairs.append((*layer.start_values(name), -scale))
    return _merged(W, pairs) if pairs else W


def _merged(
    W: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, float]]
) -> torch.Tensor:
    with torch.autocast(W.device.type, enabled=False), _exact_float32():
        (A, B, scale), *others = pairs
        delta = (B.float() @ A.float()).mul_(scale)
        for A, B, scale in others:
            delta.add_((B.float() @ A.float()).mul_(scale))
        return delta.reshape(W.shape).add_(W.float()).to(W.dtype)


def _replacements(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return, by plain name, the tensors that the active adapters bring instead of the base's."""
    found: dict[str, torch.Tensor] = {}
    for fqn, host in hosts(module):
        if isinstance(host, SavedModule):
            owner = next((name for name in host.active if name in host.names), None)
            if owner is not None:
                copies = host.modules_to_save[owner].state_dict()
                found |= {f"{fqn}.{key}": value for key, value in copies.items()}
        elif (owner := bias_owner(host.active, host.lora_bias)) is not None:
            found.setdefault(f"{fqn}.bias", host.lora_bias[owner].detach())
    return found


def check_untied(module: nn.Module) -> None:
    """Raise ``LoraError`` when a weight that an adapter changes belongs to another module too."""
    targets: dict[int, str] = {}
    for fqn, host in hosts(module):
        if isinstance(host, SavedModule):
            own = host.original_module.named_parameters()
            targets |= {id(p): to_plain_name(f"{fqn}.{name}") for name, p in own}
        elif not isinstance(host, BiasSwitch):
            targets[id(host.weight)] = f"{fqn}.weight"
    for key, parameter in module.named_parameters(remove_duplicate=False):
        name = to_plain_name(key)
        target = targets.get(id(parameter), name)
        if name != target:
            raise LoraError(
                f"{target} is tied to {name}; merging an adapter into one of them would break the "
                "tie. Give the adapted layer its own copy of the weight, or do not target it"
            )


@contextmanager
def _exact_float32() -> Iterator[None]:
    # Per backend: the global getter fails once a user has set only one backend.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
