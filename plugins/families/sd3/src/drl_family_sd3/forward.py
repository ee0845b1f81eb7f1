"""The model call of Stable Diffusion 3: conditions in, velocity out, guidance on top.

Axes: ``B`` rows, ``C H W`` latent channels and size, ``T`` text tokens, ``D`` features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from drl.api import VISUAL, Condition, ConditionRecord, ContractError, Guidance, Streams
from drl.mathematics.guidance import combine as guided

if TYPE_CHECKING:
    from torch import Tensor, nn

TEXT = "encoder_hidden_states"
POOLED = "pooled_projections"
RANKS: Mapping[str, int] = {TEXT: 2, POOLED: 1}
"""Forward arguments by name, and the rank of one row without its batch axis."""


def condition_of(record: ConditionRecord) -> Condition:
    """Give each tensor of a record its batch axis of 1; engines send it with or without."""
    return Condition(arguments={name: _row(record, name) for name in RANKS}, rows=1)


def _row(record: ConditionRecord, name: str) -> Tensor:
    if name not in record.tensors:
        raise ContractError(
            f"the condition of family 'sd3' needs {', '.join(RANKS)}; the engine sent "
            f"{', '.join(sorted(record.tensors)) or 'nothing'}"
        )
    tensor = record.tensors[name]
    rank = RANKS[name]
    if tensor.ndim == rank:
        return tensor.unsqueeze(0)
    if tensor.ndim == rank + 1 and tensor.shape[0] == 1:
        return tensor
    raise ContractError(
        f"{name} of one sample has shape {tuple(tensor.shape)}; family 'sd3' needs rank {rank}, or "
        f"rank {rank + 1} with a first axis of 1"
    )


def join(conditions: Sequence[Condition]) -> Condition:
    """Join conditions along the batch axis; ContractError when text lengths differ."""
    lengths = {condition.arguments[TEXT].shape[1] for condition in conditions}
    if len(lengths) > 1:
        raise ContractError(
            f"conditions of one batch have {sorted(lengths)} text tokens; family 'sd3' pads every "
            "prompt to one length, so they come from differently set engines (model.sd3.t5_tokens)"
        )
    joined = {name: torch.cat([c.arguments[name] for c in conditions]) for name in RANKS}
    return Condition(arguments=joined, rows=sum(condition.rows for condition in conditions))


def predict(model: nn.Module, latents: Tensor, time_B: Tensor, condition: Condition) -> Tensor:
    """Return the velocity ``(B, C, H, W)``, noise minus data, in the model's output dtype."""
    output: tuple[Tensor, ...] = model(
        hidden_states=latents,
        timestep=time_B,
        encoder_hidden_states=condition.arguments[TEXT],
        pooled_projections=condition.arguments[POOLED],
        return_dict=False,
    )
    return output[0]


def combine(positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
    """Return ``u + g (p - u)`` in the model's dtype; the true scale means nothing to this model."""
    return {VISUAL: guided(negative[VISUAL], positive[VISUAL], guidance.scale)}
