"""``Family.predict``: guidance in two forwards or in one of twice the rows, and none where it is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.interfaces.family import Family, Pipeline, TrainPipelineConfig, WeightSource
from drl.mathematics.gaussian import over_rows
from drl.mathematics.guidance import combine
from drl.types import Condition, ConditionRecord, Context, Guidance, Streams

ON, OFF = Guidance(scale=4.5), Guidance(scale=1.0)


class TwoStreams(Family):
    """Pictures and sound: each is moved by the other's mean, by time and by text."""

    streams = ("visual", "audio")

    def forward(
        self, model: nn.Module, streams: Streams, model_time_B: Tensor | None, condition: Condition
    ) -> Streams:
        picture, sound = streams["visual"], streams["audio"]
        shift_B = condition.arguments["text"].mean(1)
        if model_time_B is not None:
            shift_B = shift_B + model_time_B
        self.seen.append((len(picture), condition.rows))
        other_B = sound.flatten(1).mean(1)
        return {
            "visual": model(picture) + over_rows(shift_B * other_B, picture),
            "audio": sound + over_rows(shift_B, sound),
        }

    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        return {n: combine(negative[n], positive[n], guidance.scale) for n in positive}

    def collate(self, conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        text = torch.cat([one.arguments["text"] for one in conditions])
        return Condition(arguments={"text": text}, rows=len(text))

    def condition(self, record: ConditionRecord) -> Condition:
        raise NotImplementedError

    def model_time(self, sigma_B: Tensor, timestep_B: Tensor | None) -> Tensor:
        raise NotImplementedError

    def pipeline_config(self, component: str, config: Mapping[str, Any]) -> TrainPipelineConfig:
        raise NotImplementedError

    def build(self, component: str, source: WeightSource) -> nn.Module:
        raise NotImplementedError

    def component_config(self, component: str, checkpoint: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def pipeline(self, checkpoint: str, context: Context) -> Pipeline | None:
        return None


@pytest.fixture
def family() -> TwoStreams:
    made = TwoStreams(None, Context())
    made.seen = []
    return made


def text(seed: int, rows: int = 3) -> Condition:
    generator = torch.Generator().manual_seed(seed)
    return Condition(arguments={"text": torch.randn(rows, 5, generator=generator)}, rows=rows)


def inputs(rows: int = 3) -> tuple[nn.Module, Streams, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 4, generator=generator))
        model.bias.zero_()
    streams = {
        "visual": torch.randn(rows, 2, 3, 4, generator=generator),
        "audio": torch.randn(rows, 7, generator=generator),
    }
    return model, streams, torch.rand(rows, generator=generator)


@pytest.mark.parametrize("timed", [True, False])
def test_one_forward_of_both_gives_what_two_give(family: TwoStreams, timed: bool) -> None:
    model, streams, time_B = inputs()
    time = time_B if timed else None
    found = [
        family.predict(
            model, streams, time, family.conditions(text(1), text(2), batched=batched), ON
        )
        for batched in (False, True)
    ]
    assert family.seen == [(3, 3), (3, 3), (6, 6)]
    for name in family.streams:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-5, atol=1e-5)
        assert found[1][name].shape == streams[name].shape


def test_the_scale_leads_from_the_negative_to_the_positive(family: TwoStreams) -> None:
    """``u + 4.5 (p - u)`` of sound that moves by the mean of the text: 2 and -1 here, so 2 + 3.5 x 3."""
    model, streams, _ = inputs(1)
    texts = [Condition(arguments={"text": torch.full((1, 5), value)}) for value in (2.0, -1.0)]
    for batched in (False, True):
        conditions = family.conditions(*texts, batched=batched)
        found = family.predict(model, streams, None, conditions, ON)["audio"]
        assert torch.allclose(found, streams["audio"] + 12.5, atol=1e-5)


@pytest.mark.parametrize(
    ("negative", "guidance"), [(None, ON), (text(2), OFF)], ids=["no negative", "off"]
)
@pytest.mark.parametrize("batched", [False, True])
def test_without_guidance_there_is_one_plain_forward(
    family: TwoStreams, negative: Condition | None, guidance: Guidance, batched: bool
) -> None:
    model, streams, time_B = inputs()
    conditions = family.conditions(text(1), negative, batched=batched)
    found = family.predict(model, streams, time_B, conditions, guidance)
    plain = family.forward(model, streams, time_B, text(1))
    assert family.seen == [(3, 3), (3, 3)]
    assert all(torch.equal(found[name], plain[name]) for name in family.streams)


def test_conditions_are_joined_once_and_only_where_it_is_asked_for(family: TwoStreams) -> None:
    joined = family.conditions(text(1), text(2), batched=True).joint
    assert joined is not None
    assert joined.rows == 6
    both = [text(seed).arguments["text"] for seed in (1, 2)]
    assert torch.equal(joined.arguments["text"], torch.cat(both))
    assert family.conditions(text(1), text(2), batched=False).joint is None
    assert family.conditions(text(1), None, batched=True).joint is None


@pytest.mark.parametrize("batched", [False, True])
def test_the_gradient_is_that_of_the_guided_prediction(family: TwoStreams, batched: bool) -> None:
    """``d/dW`` of ``u + g (p - u)`` for a W that both see alike: that of one plain forward."""
    model, streams, time_B = inputs()
    conditions = family.conditions(text(1), text(2), batched=batched)
    family.predict(model, streams, time_B, conditions, ON)["visual"].sum().backward()
    assert isinstance(model, nn.Linear)
    assert model.weight.grad is not None
    expected = streams["visual"].flatten(0, -2).sum(0).expand(4, 4)
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-4, atol=1e-4)
