"""What a component is fed: dtypes of inputs, and the guidance of a route."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.errors import BadInput
from drl.interfaces.family import InputDtypes
from drl.mathematics.feeding import Feeding, guidance_by_option, routed
from drl.types import Condition, Conditions, Guidance, Sampling

SAMPLING = Sampling(num_steps=2, height=8, width=8)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def conditions(**more: Any) -> Conditions:
    arguments = {"text": torch.ones(2, 3), "lengths": torch.tensor([3, 2]), "size": [8, 8]}
    return Conditions(positive=Condition(arguments=arguments, rows=2), **more)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (InputDtypes(latents="default"), (BF16, FP32, FP32)),
        (InputDtypes(timestep="default"), (FP32, BF16, FP32)),
        (InputDtypes(condition="fp16", latents="fp32"), (FP32, FP32, FP16)),
    ],
)
def test_inputs_are_in_the_dtypes_that_a_family_asks_for(
    dtypes: InputDtypes, expected: tuple[torch.dtype, ...]
) -> None:
    given = conditions(negative=conditions().positive, joint=conditions().positive)
    streams, time_B, made = Feeding(dtypes).cast(
        BF16, {"visual": torch.zeros(2, 4)}, torch.tensor([500.0, 1.0]), given
    )
    assert time_B is not None
    for one in (made.positive, made.negative, made.joint):
        assert one is not None
        assert (streams["visual"].dtype, time_B.dtype, one.arguments["text"].dtype) == expected
        assert one.arguments["lengths"].dtype == torch.int64
        assert (one.arguments["size"], one.rows) == ([8, 8], 2)


def test_a_family_without_wishes_gets_the_very_inputs() -> None:
    streams: dict[str, Tensor] = {"visual": torch.zeros(2, 4)}
    given, time_B = conditions(), torch.ones(2)
    made = Feeding().cast(BF16, streams, time_B, given)
    assert made[0] is streams
    assert made[1] is time_B
    assert made[2] is given


def test_guidance_is_that_of_the_route_in_the_form_of_the_component() -> None:
    both = replace(SAMPLING, guidance_scale=3.0, guidance_scale_2=2.0, true_cfg_scale=1.5)
    found = guidance_by_option(both)
    assert routed(found, "guidance_scale", Feeding()) == Guidance(scale=3.0, true_scale=1.5)
    joint = routed(found, "guidance_scale_2", Feeding(joint=True))
    assert joint == Guidance(scale=2.0, true_scale=1.5, joint=True)


def test_a_scale_that_guides_nothing_is_told_to_the_model_all_the_same() -> None:
    """A model that was distilled with guidance takes the scale as an input, with no negative branch."""
    distilled = replace(SAMPLING, guidance_scale=3.5, true_cfg_scale=1.0)
    assert not distilled.guided
    found = routed(guidance_by_option(distilled), "guidance_scale", Feeding())
    assert (found.scale, found.on) == (3.5, False)


def test_the_option_of_a_route_must_be_set_where_anything_guides() -> None:
    assert set(guidance_by_option(SAMPLING)) == {"guidance_scale"}
    assert routed(guidance_by_option(SAMPLING), "guidance_scale_2", Feeding()) == Guidance()
    guided = guidance_by_option(replace(SAMPLING, guidance_scale=2.0))
    with pytest.raises(BadInput, match=r"wants sampling\.guidance_scale_2 at this timestep"):
        routed(guided, "guidance_scale_2", Feeding())
