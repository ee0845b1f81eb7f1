"""Putting adapters into a model, filling them, choosing which one trains, and taking them out."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drl.lora.config import LoraConfig
from drl.lora.errors import LoraError, name_list
from drl.lora.layer import DEFAULT, AdapterSettings, LoraLayer, adapted
from drl.lora.match_errors import check_match
from drl.lora.matching import TargetMatch, match_targets, unused_keys
from drl.lora.sharding import copy_into, copy_parameter, full_tensor
from drl.lora.switches import BiasSwitch, Host, SavedModule
from drl.lora.switching import check_unmerged
from drl.lora.tree import (
    Place,
    adapter_names,
    base_state,
    hosts,
    hosts_of,
    lora_layers,
    places,
)


def inject(
    module: nn.Module,
    config: LoraConfig,
    *,
    generator: torch.Generator,
    name: str = DEFAULT,
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> tuple[str, ...]:
    """Put an adapter into ``module`` in place, freeze the base, and fill the adapter.

    Returns the plain paths of the adapted layers in registration order. A and B have ``dtype``
    whatever the base has; trained biases and saved modules keep the base's. A trainable adapter
    becomes the active one and the only one that trains; one that is not ``trainable`` becomes
    active only where it is the first. On a module with meta parameters filling is left to the
    caller: call ``reset_adapters`` once the base weights are loaded.

    Raises ``LoraError`` before changing anything: an entry of the config that matches nothing, a
    match that cannot be adapted, a name that is taken or no valid name, a generator that is not on
    the CPU, parameters that are sharded already (an adapter injected now would not be).
    """
    check_generator(generator)
    check_injectable(module, name)
    match = match_targets(module, config)
    check_match(match, module, config)
    for field, key in unused_keys(config, match.layers):
        warnings.warn(f'{field} key "{key}" decides nothing: an earlier key wins', stacklevel=2)
    wrap(module, match, config, name=name, dtype=dtype, trainable=trainable)
    if not any(tensor.is_meta for tensor in adapter_parameters(module, name)):
        reset_adapters(module, generator, name)
    return tuple(match.layers)


def wrap(
    module: nn.Module,
    match: TargetMatch,
    config: LoraConfig,
    *,
    name: str,
    dtype: torch.dtype,
    trainable: bool,
) -> None:
    """Add an adapter at the matched places, A and B uninitialised, and freeze the rest."""
    # Built first: a layer that cannot be adapted is refused before the model changes.
    layers = {fqn: _layer_at(place) for fqn, place in match.layers.items()}
    known = adapter_names(module)
    active = next((host.active for _, host in hosts(module)), ())
    training = [p for other in known for p in _trained(module, other) if p.requires_grad]
    for fqn, layer in layers.items():
        layer.add(name, _settings(config, fqn), dtype)
        _replace(match.layers[fqn], layer)
    found = places(module)
    for fqn in match.biases:
        _add_bias(found[fqn], name)
    for fqn in match.saved:
        _add_saved(found[fqn], name)
    module.requires_grad_(False)
    for parameter in _trained(module, name) if trainable else training:
        parameter.requires_grad_(True)
    for _, host in hosts(module):
        host.active = (name,) if trainable or not known else active


def reset_adapters(module: nn.Module, generator: torch.Generator, name: str = DEFAULT) -> None:
    """Fill an adapter with fresh start values, drawn layer by layer in sorted name order.

    Values are drawn in float32 on the CPU and then moved, so they do not depend on device, dtype,
    sharding or rank; those that come from the base weight are the first rank's. Saved modules and
    biases start as copies of the base. Under sharding every rank calls this with equally seeded
    generators.
    """
    check_generator(generator)
    layers = {
        fqn: host
        for fqn, host in hosts_of(module, name)
        if isinstance(host, LoraLayer) and name in host.settings
    }
    unready = [fqn for fqn, layer in layers.items() if any(f.is_meta for f in layer.factors(name))]
    if unready:
        raise LoraError(
            f"adapters on the meta device cannot be filled: {name_list(unready)}; give them "
            "storage first (module.to_empty(device=...) and load the base weights)"
        )
    check_unmerged(hosts(module))
    for fqn in sorted(layers):
        _reset(layers[fqn], name, generator)
    seed_saved_modules(module, name)


def seed_saved_modules(module: nn.Module, name: str | None = None) -> None:
    """Copy the base values into the saved modules and biases of an adapter, or of all of them.

    For models built on the meta device: call it once the base weights are loaded, before adapter
    values are. Copies keep their own dtype. Under sharding every rank calls this.
    """
    check_unmerged(hosts(module))
    for _, host in hosts(module):
        for owner in host.names if name is None else (name,):
            _seed(host, owner)


def train_adapter(module: nn.Module, name: str) -> None:
    """Make one adapter train and freeze everything else; which ones are active stays as it is."""
    chosen = _trained(module, name)
    module.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)


def remove_adapter(module: nn.Module, name: str) -> None:
    """Take an adapter out; where it was the only one, the base module is in its place again.

    Raises ``LoraError`` when the model lacks it, and while adapters are merged into the weights.
    """
    found = hosts_of(module, name)
    check_unmerged(hosts(module))
    for _, host in found:
        host.remove(name)
    for place in places(module).values():
        if place.host is not None and not place.host.names:
            setattr(place.parent, place.child, place.module)
    for parent in list(module.modules()):
        for child, candidate in list(parent.named_children()):
            if isinstance(candidate, SavedModule) and not candidate.names:
                setattr(parent, child, candidate.original_module)


def adapter_parameters(module: nn.Module, name: str) -> list[torch.Tensor]:
    """Return all live tensors of one adapter, buffers of saved modules included."""
    return [tensor for _, host in hosts_of(module, name) for tensor in host_tensors(host, name)]


def host_tensors(host: Host, name: str) -> list[torch.Tensor]:
    """Return the tensors of one adapter at one place."""
    if isinstance(host, SavedModule):
        return list(host.modules_to_save[name].state_dict(keep_vars=True).values())
    tensors: list[torch.Tensor] = []
    if isinstance(host, LoraLayer) and name in host.settings:
        tensors += host.factors(name)
    return [*tensors, host.lora_bias[name]] if name in host.lora_bias else tensors


def check_generator(generator: torch.Generator) -> None:
    """Refuse generators of other devices."""
    if generator.device.type != "cpu":
        raise LoraError(
            f"the generator is on {generator.device}; adapters are drawn on the CPU so that they "
            'do not depend on the device: pass torch.Generator("cpu")'
        )


def check_injectable(module: nn.Module, name: str) -> None:
    """Refuse names that are taken or that no file can carry, and modules that are sharded."""
    if not name or "." in name or name in "lora_" or name in dir(nn.ModuleDict()):
        raise LoraError(
            f'"{name}" cannot be the name of an adapter: it must not be empty, contain a dot, be a '
            'part of "lora_" or an attribute of torch containers; take a name such as "old"'
        )
    if name in adapter_names(module):
        raise LoraError(
            f'the module already has adapters called "{name}"; give another name, or remove them '
            "first (remove_adapter)"
        )
    check_unmerged(hosts(module))
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise LoraError(
            "the parameters are sharded already, and an adapter injected now would not be: nobody "
            "would reduce its gradients. Inject before fully_shard"
        )


def _settings(config: LoraConfig, fqn: str) -> AdapterSettings:
    return AdapterSettings(
        rank=config.rank_of(fqn),
        alpha=config.alpha_of(fqn),
        scale=config.scale_of(fqn),
        init=config.init,
        dropout=config.dropout,
    )


def _layer_at(place: Place) -> LoraLayer:
    if isinstance(place.host, LoraLayer):
        return place.host
    layer = adapted(place.module)
    if place.host is not None:
        layer.lora_bias = place.host.lora_bias
    return layer


def _replace(place: Place, layer: LoraLayer) -> None:
    if place.host is not layer:
        setattr(place.parent, place.child, layer)


def _add_bias(place: Place, name: str) -> None:
    host = place.host
    if host is None:
        host = BiasSwitch(place.module).train(place.module.training)
        setattr(place.parent, place.child, host)
    bias = place.module.get_parameter("bias")
    host.lora_bias[name] = nn.Parameter(bias.detach().clone())


def _add_saved(place: Place, name: str) -> None:
    saved = place.saved
    if saved is None:
        now = place.module if place.host is None else place.host
        saved = SavedModule(now).train(place.module.training)
        setattr(place.parent, place.child, saved)
    saved.add(name, place.module)


def _trained(module: nn.Module, name: str) -> list[nn.Parameter]:
    tensors = adapter_parameters(module, name)
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]


def rebuild_starts(module: nn.Module, name: str) -> None:
    """Compute the start values of ``pissa`` and ``olora`` from the base weights, in float32.

    For adapters that were trained elsewhere: their A and B are relative to these values.
    """
    generator = torch.Generator()
    for layer in lora_layers(module).values():
        if name in layer.lora_start:
            A, B = layer.start(name, generator, full_tensor(layer.weight).float())
            layer.lora_start[name].A, layer.lora_start[name].B = A, B


def _reset(layer: LoraLayer, name: str, generator: torch.Generator) -> None:
    from_base = name in layer.lora_start
    W = full_tensor(layer.weight).float() if from_base else None
    A, B = layer.start(name, generator, W)
    down, up = layer.factors(name)
    copy_into(down, A, from_first_rank=from_base)
    copy_into(up, B, from_first_rank=from_base)
    if from_base:
        # what the factors hold after rounding to their dtype: at the start the update is 0
        layer.lora_start[name].A = full_tensor(down).float().clone()
        layer.lora_start[name].B = full_tensor(up).float().clone()


def _seed(host: Host, name: str) -> None:
    if isinstance(host, SavedModule):
        if name in host.modules_to_save:
            base = base_state(host.original_module)
            for key, value in host.modules_to_save[name].state_dict().items():
                copy_parameter(value, base[key])
    elif name in host.lora_bias:
        copy_parameter(host.lora_bias[name], host.base_layer.get_parameter("bias"))
