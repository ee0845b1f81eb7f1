"""An exponential moving average of the trained weights: the shadow, its decay, and changing places.

The shadow is the "old policy": what engines may roll out and what a loss may compare with. It moves once
per rollout's training, never when weights are published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drl.errors import BadInput, CheckpointError, ContractError
from drl.lora import adapter_off
from drl.model.parallel import reshard
from drl.model.shards import local

if TYPE_CHECKING:
    from torch import Tensor, nn

Reference = Callable[[str], AbstractContextManager[None]]
"""By component: a context in which its model is the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaSettings:
    """How much of the shadow stays at an update (rl-post-training reference 4.6).

    ``decay_init`` during the first ``decay_flat_steps`` updates; after them ``decay_ramp`` more at each
    update, from 0 up to ``decay_max``.
    """

    decay_init: float = 0.001
    decay_ramp: float = 0.001
    decay_max: float = 0.5
    decay_flat_steps: int = 0


def ema_decay(update: int, settings: EmaSettings) -> float:
    """Return the share of the shadow that update ``update`` keeps; updates count from 1."""
    if update <= settings.decay_flat_steps:
        return settings.decay_init
    return min((update - settings.decay_flat_steps) * settings.decay_ramp, settings.decay_max)


class Ema:
    """A float32 shadow of every trainable parameter; of the local shard where parameters are sharded.

    ``parameters`` by ``component.name``. ``models``: the components; those wrapped by FSDP2 drop their
    gathered parameters before weights change places. Raises BadInput when there is nothing to average.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: EmaSettings,
        *,
        models: Sequence[nn.Module] = (),
    ) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        if not self.parameters:
            raise BadInput("ema.enabled: the model has no trainable parameter to average")
        self.settings = settings
        self.count = 0
        self.is_swapped = False
        self._models = models
        self._shadow = {
            # a copy even where the dtype is float32 already
            name: p.detach().to(torch.float32, copy=True)
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the shadow towards the trained weights by one update; nothing waits for the device.

        A lerp in float32: a parameter that did not move keeps a shadow that equals it to the bit, and
        decay 0 is a copy. Raises ContractError while weights are swapped.
        """
        if self.is_swapped:
            raise ContractError("the EMA cannot be updated while its shadow is in the model")
        self.follow()
        self.count += 1
        share = 1.0 - ema_decay(self.count, self.settings)
        shadows = [local(shadow) for shadow in self._shadow.values()]
        weights = [local(p.detach()).to(torch.float32) for p in self.parameters.values()]
        torch._foreach_lerp_(shadows, weights, share)

    def advance(self) -> dict[str, float]:
        """Update at the end of a rollout's training; return the figures of the update."""
        self.update()
        return {
            "train/ema_decay": ema_decay(self.count, self.settings),
            "train/ema_updates": float(self.count),
            "train/ema_distance": self.distance().item(),
        }

    @torch.no_grad()
    def distance(self) -> Tensor:
        """Return the largest difference between shadow and weights over all ranks, a scalar.

        Exactly 0 means that old policy and trained policy are the same. Collective where sharded.
        """
        device = next(iter(self.parameters.values())).device
        gaps = [torch.zeros((), device=device)]  # a rank may hold nothing of every parameter
        for name, parameter in self.parameters.items():
            weights = local(parameter.detach())
            if weights.numel():
                gaps.append((local(self._shadow[name]) - weights).abs().amax())
        gap = torch.stack(gaps).amax()
        sharded = [p for p in self.parameters.values() if isinstance(p, DTensor)]
        for group in sharded[0].device_mesh.get_all_groups() if sharded else ():
            dist.all_reduce(gap, op=dist.ReduceOp.MAX, group=group)
        return gap

    @contextmanager
    def swapped(self, component: str | None = None) -> Iterator[None]:
        """Put the shadow into the model, of one component only on request; weights come back after.

        Parameter objects stay, their data change places, and the weights come back to the bit whatever
        is raised inside. Raises ContractError when it is nested.
        """
        if self.is_swapped:
            raise ContractError(
                "the EMA's shadow is in the model already; it cannot be swapped twice"
            )
        names = [
            name
            for name in self.parameters
            if component is None or name.startswith(f"{component}.")
        ]
        if not names:
            raise ContractError(f"the EMA has no parameters of a component '{component}'")
        self.follow()
        self._drop_copies()
        self.is_swapped = True
        held: dict[str, Tensor] = {}
        try:
            for name in names:
                held[name] = take_out(self.parameters[name])
                put_in(self.parameters[name], self._shadow[name])
            yield
        finally:
            self._drop_copies()
            for name, weights in held.items():
                put_back(self.parameters[name], weights)
            self.is_swapped = False

    def follow(self) -> None:
        """Move the shadow to the devices of its parameters, which may have been moved."""
        for name, parameter in self.parameters.items():
            if self._shadow[name].device != parameter.device:
                self._shadow[name] = self._shadow[name].to(parameter.device)

    def _drop_copies(self) -> None:
        """Free copies of the weights that leave: gathered by FSDP2, or cast by autocast."""
        reshard(self._models)
        torch.clear_autocast_cache()

    def state(self) -> dict[str, Tensor]:
        """Return the shadow itself by ``component.name``: float32, sharded as the parameters are."""
        return dict(self._shadow)

    def load(self, state: Mapping[str, Tensor], count: int) -> None:
        """Copy a shadow in and go on after ``count`` updates.

        Raises CheckpointError, before anything changed, when names or shapes differ.
        """
        missing = sorted(self._shadow.keys() - state.keys())
        unexpected = sorted(state.keys() - self._shadow.keys())
        wrong = [
            f"{name}: {tuple(state[name].shape)}, the model has {tuple(shadow.shape)}"
            for name, shadow in self._shadow.items()
            if name in state and state[name].shape != shadow.shape
        ]
        if missing or unexpected or wrong:
            raise CheckpointError(
                f"the EMA of the checkpoint does not fit this recipe's model: {len(missing)} missing "
                f"{missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}, {len(wrong)} of another "
                f"shape {wrong[:3]}\nresume with the recipe that the checkpoint was made with"
            )
        with torch.no_grad():
            for name, shadow in self._shadow.items():
                shadow.copy_(state[name])
        self.count = count

    def reset(self) -> None:
        """Copy the weights again and count from 0, for weights that came without a shadow."""
        with torch.no_grad():
            for name, shadow in self._shadow.items():
                local(shadow).copy_(local(self.parameters[name].detach()))
        self.count = 0

    def facts(self) -> dict[str, float | int]:
        """Return what a checkpoint keeps besides the shadow: the count, and the decay's settings."""
        return {"count": self.count, **asdict(self.settings)}

    def take_settings(self, facts: Mapping[str, Any]) -> list[str]:
        """Go on with the decay of a checkpoint; return a line for each setting that differs."""
        kept = {name: facts[name] for name in asdict(self.settings)}
        lines = [
            f"ema.{name}: the recipe has {now}, the checkpoint {kept[name]}; the checkpoint's holds"
            for name, now in asdict(self.settings).items()
            if kept[name] != now
        ]
        self.settings = EmaSettings(**kept)
        return lines


@torch.no_grad()
def take_out(parameter: nn.Parameter) -> Tensor:
    """Return the weights of a parameter, to be put back later.

    FSDP2 gathers from storage of its own, which a parameter's local shard is a view of: there the
    weights must leave by a copy. A plain parameter's weights leave with their storage.
    """
    return local(parameter.detach()).clone() if isinstance(parameter, DTensor) else parameter.data


@torch.no_grad()
def put_in(parameter: nn.Parameter, shadow: Tensor) -> None:
    """Let a parameter hold the shadow, in the parameter's dtype."""
    if isinstance(parameter, DTensor):
        local(parameter.data).copy_(local(shadow))
    else:
        parameter.data = shadow.to(parameter.dtype)


@torch.no_grad()
def put_back(parameter: nn.Parameter, weights: Tensor) -> None:
    """Let a parameter hold the weights again that ``take_out`` returned."""
    if isinstance(parameter, DTensor):
        local(parameter.data).copy_(weights)
    else:
        parameter.data = weights


def build_ema(
    recipe: Any, parameters: Mapping[str, nn.Parameter], models: Mapping[str, nn.Module]
) -> Ema | None:
    """Return the moving average of the recipe, None without one; weights must be in place already."""
    if not recipe.ema.enabled:
        return None
    options = recipe.ema
    settings = EmaSettings(
        decay_init=options.decay_init,
        decay_ramp=options.decay_ramp,
        decay_max=options.decay_max,
        decay_flat_steps=options.decay_flat_steps,
    )
    return Ema(parameters, settings, models=tuple(models.values()))


def build_old_policy(
    parameters: Mapping[str, nn.Parameter], models: Mapping[str, nn.Module]
) -> Ema:
    """Return a copy of the weights for runs without an average; ``reset`` makes it the weights of now."""
    return Ema(parameters, EmaSettings(), models=tuple(models.values()))


def build_reference(mode: str, models: Mapping[str, nn.Module], ema: Ema | None) -> Reference:
    """Return what turns a component into the reference; raises BadInput for a mode that cannot."""
    if mode == "lora_base":
        return lambda component: adapter_off(models[component])
    if mode == "ema" and ema is not None:
        return ema.swapped
    raise BadInput(
        f"algorithm.ref_mode = '{mode}', but the loss needs a reference; use 'lora_base' with "
        "lora.enabled = true, or 'ema' with ema.enabled = true"
    )
