"""What a component is fed, the same in engine and trainer: the dtypes of its inputs, and its guidance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drl.errors import BadInput
from drl.interfaces.family import PASSTHROUGH, InputDtypes, TrainPipelineConfig
from drl.types import Condition, Conditions, Guidance, Streams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Feeding:
    """``dtypes``: of the inputs, as the family wants them; ``joint``: guidance has the joint form."""

    dtypes: InputDtypes = PASSTHROUGH
    joint: bool = False

    @classmethod
    def of(cls, config: TrainPipelineConfig) -> Feeding:
        """Take what the family says of a component."""
        return cls(config.input_dtypes, config.joint_guidance)

    def cast(
        self, forward: torch.dtype, streams: Streams, time_B: Tensor | None, conditions: Conditions
    ) -> tuple[Streams, Tensor | None, Conditions]:
        """Return the inputs in their dtypes; "default" is ``forward``. Nothing is copied that need not be."""
        if self.dtypes == PASSTHROUGH:
            return streams, time_B, conditions

        def cast(policy: str | None, tensor: Tensor) -> Tensor:
            if policy is None or not tensor.is_floating_point():
                return tensor
            return tensor.to(forward if policy == "default" else DTYPES[policy])

        def condition(one: Condition | None) -> Condition | None:
            if one is None or self.dtypes.condition is None:
                return one
            arguments = {
                name: cast(self.dtypes.condition, value) if isinstance(value, Tensor) else value
                for name, value in one.arguments.items()
            }
            return replace(one, arguments=arguments)

        positive = condition(conditions.positive)
        assert positive is not None
        return (
            {name: cast(self.dtypes.latents, latents) for name, latents in streams.items()},
            None if time_B is None else cast(self.dtypes.timestep, time_B),
            Conditions(
                positive=positive,
                negative=condition(conditions.negative),
                joint=condition(conditions.joint),
            ),
        )


def guidance_by_option(sampling: Any) -> dict[str, Guidance]:
    """Return the guidance of each option that a family's routes may name; a second one where it is set."""
    scales = {
        "guidance_scale": sampling.guidance_scale,
        "guidance_scale_2": sampling.guidance_scale_2,
    }
    return {
        option: Guidance(scale=scale, true_scale=sampling.true_cfg_scale)
        for option, scale in scales.items()
        if scale is not None
    }


def routed(by_option: Mapping[str, Guidance], option: str, feeding: Feeding) -> Guidance:
    """Return the guidance of a route; none where its own option is not set and no other one guides.

    BadInput where another one does.
    """
    guidance = by_option.get(option)
    if guidance is None:
        if any(one.on for one in by_option.values()):
            raise BadInput(f"the model wants sampling.{option} at this timestep, but it is not set")
        guidance = Guidance()
    return replace(guidance, joint=feeding.joint)
