"""Operations of an iteration: what its rollout and its training had to compute, by the family's count.

Useful work alone: matrix products of the model, of adapters and of the forwards that the objective asks
for. What is computed twice (activations under checkpointing, filler rows, the parity replay) is no work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.interfaces.family import RowShape
from drl.lora.work import adapter_flops
from drl.model.compiled import outermost
from drl.types import Need

if TYPE_CHECKING:
    from torch import Tensor

    from drl.interfaces.family import Family
    from drl.interfaces.loss import Loss
    from drl.model.build import Component
    from drl.types import ConditionRecord, Pair, Sample

Rows = Counter[tuple[str, RowShape]]
"""How many rows there are, by component and size."""

TEXT = "encoder_hidden_states"
"""Field of a condition record whose first axis counts the text tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Operations of one row: a forward of the base, of its adapters, and a forward with its backward.

    ``training``: None where adapters begin after the first block, which no family's count tells.
    """

    forward: float
    adapters: float
    training: float | None


@dataclass(slots=True, kw_only=True)
class WorkCounter:
    """Counts the operations of samples and pairs; every size of row is asked of the family once.

    ``branches``: forwards of a sampling step (2 with guidance). None wherever the family does not know.
    """

    family: Family
    loss: Loss
    components: Mapping[str, Component]
    checkpoint: str
    branches: int
    trained: bool = True
    _known: dict[tuple[str, RowShape], RowWork | None] = field(default_factory=dict)
    _configs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _late: dict[str, bool] = field(default_factory=dict)

    def row(self, component: str, shape: RowShape) -> RowWork | None:
        """Return the work of one row of a component; None when its family does not know."""
        if (component, shape) not in self._known:
            self._known[component, shape] = self._row(component, shape)
        return self._known[component, shape]

    def _row(self, component: str, shape: RowShape) -> RowWork | None:
        if component not in self._configs:
            self._configs[component] = self.family.component_config(component, self.checkpoint)
        config = self._configs[component]
        flops = self.family.flops(component, config, shape)
        if flops is None:
            return None
        built = self.components.get(component)
        if built is None or built.lora is None:
            return RowWork(
                forward=flops.forward, adapters=0.0, training=flops.training(frozen=False)
            )
        rows: dict[str, int | None] = {}

        def rows_of(layer: str) -> int:
            rows[layer] = self.family.layer_rows(component, config, shape, layer)
            return rows[layer] or 0

        adapters = adapter_flops(built.module, rows_of)
        if None in rows.values():
            return None
        if not begins_in_first_block(built):
            self._late.setdefault(component, False)
            return RowWork(forward=flops.forward, adapters=adapters, training=None)
        training = flops.training(frozen=True) + 3 * adapters
        return RowWork(forward=flops.forward, adapters=adapters, training=training)

    def samples(self, samples: list[Sample]) -> float | None:
        """Return the operations of generating samples: the base's forwards at every step, all branches."""
        rows: Rows = Counter()
        for sample in samples:
            shape = self._sampled_shape(sample)
            if shape is None:
                return None
            rows.update({(name, shape): count for name, count in self._steps(sample).items()})
        total = 0.0
        for (component, shape), count in rows.items():
            work = self.row(component, shape)
            if work is None:
                return None
            total += self.branches * count * work.forward
        return total

    def _steps(self, sample: Sample) -> Counter[str]:
        """Return how many sampling steps each component predicts."""
        assert sample.trajectory is not None
        times = sample.trajectory.timesteps
        if len(self.family.components) == 1:
            return Counter({self.family.components[0]: len(times)})
        return Counter(self.family.route(time).component for time in times.tolist())

    def _sampled_shape(self, sample: Sample) -> RowShape | None:
        if sample.trajectory is None:
            return None
        latents = sample.trajectory.latents.get(self.family.streams[0])
        return None if latents is None else row_shape(latents[0], sample.condition)

    def pairs(self, pairs: Rows, rescored: Rows) -> float | None:
        """Return the operations of training on pairs, counted by component and shape.

        One forward and backward of each row (a forward alone where no step is taken), and a forward for
        the old policy and the reference where the loss compares with them; all twice under guidance.
        ``rescored``: pairs that get one more forward for their old log-prob.
        """
        needs = self.loss.needs
        rows = self.loss.rows_per_pair * (self.branches if Need.GUIDANCE in needs else 1)
        total = 0.0
        for (component, shape), count in pairs.items():
            work = self.row(component, shape)
            each = None if work is None else self._trained_row(work)
            if work is None or each is None:
                return None
            alone = work.forward + work.adapters
            each += alone * (Need.OLD_PREDICTION in needs) + work.forward * (
                Need.REFERENCE in needs
            )
            total += rows * (count * each + rescored[component, shape] * alone)
        return total

    def new_late_adapters(self) -> list[str]:
        """Return components whose training is not known for it begins after their first block; each once."""
        new = [name for name, told in self._late.items() if self.trained and not told]
        self._late |= dict.fromkeys(new, True)
        return new

    def _trained_row(self, work: RowWork) -> float | None:
        return work.training if self.trained else work.forward + work.adapters

    def shape_of(self, pair: Pair) -> RowShape | None:
        """Return the size of a pair's row; None when it has no latents of the first stream, or no text."""
        latents = pair.tensors.get(self.family.streams[0])
        return None if latents is None else row_shape(latents, pair.condition)


def begins_in_first_block(component: Component) -> bool:
    """True when a backward pass goes through all blocks: something of the first, or before it, is trained.

    True also of a model without blocks, where nothing tells.
    """
    blocks = outermost(component.module, component.config.wrap)
    first = {id(parameter) for parameter in blocks[0].parameters()} if blocks else set()
    parameters = list(component.module.parameters())  # in the order of their modules
    ends = [place for place, parameter in enumerate(parameters, 1) if id(parameter) in first]
    return not ends or any(parameter.requires_grad for parameter in parameters[: ends[-1]])


def row_shape(latents: Tensor, record: ConditionRecord | None) -> RowShape | None:
    """Return the size of a row from its latents ``(*L)`` and its condition; None when that has no text."""
    text = None if record is None else record.tensors.get(TEXT)
    if text is None:
        return None
    return RowShape(latent=tuple(latents.shape), text_tokens=text.shape[0])
