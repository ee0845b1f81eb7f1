"""One micro-batch: stacked pairs, guidance, precision and scored steps, on a model worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.errors import BatchError, ContractError
from drl.interfaces.family import (
    Family,
    InputDtypes,
    Pipeline,
    Route,
    TrainPipelineConfig,
    WeightSource,
)
from drl.interfaces.loss import Loss
from drl.interfaces.steps import SdeBackend
from drl.mathematics.feeding import Feeding
from drl.mathematics.gaussian import log_prob, over_rows
from drl.stages.loss import Forward, batch_condition, loss_of, make_batch
from drl.testing import make_pair
from drl.types import (
    VISUAL,
    Condition,
    ConditionRecord,
    Context,
    ForwardInputs,
    Guidance,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    StepContext,
    Streams,
    Transition,
    successor,
)

CPU = torch.device("cpu")
ALL = frozenset({Need.TRANSITION, Need.GUIDANCE})


class Gain(nn.Module):
    """Velocity ``gain x + time / 1000 + mean of the text``, in the dtype it is fed."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor, time_B: Tensor, text: Tensor) -> Tensor:
        self.seen.append((x.dtype, time_B.dtype))
        shift_B = time_B / 1000 + text.flatten(1).mean(1)
        return self.gain * x + over_rows(shift_B, x)


class Small(Family):
    """One stream; above timestep 500 another guidance option is in force."""

    def condition(self, record: ConditionRecord) -> Condition:
        return Condition(arguments={"text": record.tensors["text"][None]})

    def collate(self, conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        text = torch.cat([one.arguments["text"] for one in conditions])
        return Condition(arguments={"text": text}, rows=len(conditions))

    def route(self, timestep: float) -> Route:
        return Route(guidance_option="guidance_scale" if timestep > 500 else "guidance_scale_2")

    def model_time(self, sigma_B: Tensor, timestep_B: Tensor | None) -> Tensor:
        return timestep_B if timestep_B is not None else 1000 * sigma_B

    def forward(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        condition: Condition,
    ) -> Streams:
        return {VISUAL: model(streams[VISUAL], model_time_B, condition.arguments["text"])}

    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        other = negative[VISUAL]
        return {VISUAL: other + guidance.scale * (positive[VISUAL] - other)}

    def pipeline_config(self, component: str, config: Mapping[str, Any]) -> TrainPipelineConfig:
        raise NotImplementedError

    def build(self, component: str, source: WeightSource) -> nn.Module:
        raise NotImplementedError

    def component_config(self, component: str, checkpoint: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def pipeline(self, checkpoint: str, context: Context) -> Pipeline | None:
        return None


class Euler(SdeBackend):
    """A Gaussian step around ``x + v dt`` with the second sigma of the table as its deviation."""

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma_B: Tensor,
        sigma_next_B: Tensor,
        *,
        sigma_max_B: Tensor,
    ) -> Transition:
        mean = latents + velocity * over_rows(sigma_next_B - sigma_B, latents)
        return Transition(mean=mean, noise_std=sigma_max_B, std_dev_t=2 * sigma_max_B)

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        return log_prob(next_latents, transition.mean, transition.noise_std)


class Keeping(Loss):
    """Keeps what core hands to it."""

    needs = ALL

    def expand(self, unit: Any, advantages: Any, context: StepContext) -> list[Pair]:
        return []

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        return ForwardInputs(streams={VISUAL: pairs.tensors[VISUAL]})

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        self.inputs, self.predictions, self.transition = inputs, predictions, transition
        return LossOutput(loss=predictions.trained[VISUAL].sum(), metrics={})


def pairs_of(count: int, sigma: float = 0.75) -> list[Pair]:
    return [
        make_pair(
            id=(n, 0), seed=n, sigma=sigma, values={"sigma_next": sigma - 0.25, "sigma_max": 0.9}
        )
        for n in range(count)
    ]


def forward_of(loss: Loss, **changes: Any) -> Forward:
    values: dict[str, Any] = {
        "family": Small(None, Context()),
        "models": {"transformer": Gain(0.5)},
        "loss": loss,
        "backend": Euler(None, Context()),
        "device": CPU,
        "dtype": "fp32",
        "guidance": {"guidance_scale": Guidance(scale=3.0), "guidance_scale_2": Guidance()},
    }
    return Forward(**(values | changes))


def kept(pairs: list[Pair], needs: frozenset[Need] = ALL, **changes: Any) -> Keeping:
    """Run one micro-batch and return the loss with what it was given."""
    loss = Keeping(None, Context())
    loss.needs = needs
    loss_of(forward_of(loss, **changes), pairs, StepContext())
    return loss


def by_hand(pair: Pair, gain: float, scale: float) -> Tensor:
    """Velocity of one row, guided: the negative text of a built pair is 0."""
    assert pair.timestep is not None
    assert pair.condition is not None
    text = pair.condition.tensors["text"].mean()
    return gain * pair.tensors[VISUAL] + pair.timestep / 1000 + scale * text


def test_predictions_are_guided_by_the_scale_of_their_phase() -> None:
    for sigma, scale in [(0.75, 3.0), (0.5, 1.0)]:
        pairs = pairs_of(3, sigma)
        found = kept(pairs).predictions.trained[VISUAL]
        for row, pair in zip(found, pairs, strict=True):
            assert torch.allclose(row, by_hand(pair, 0.5, scale), atol=1e-5)


def test_a_scale_of_one_and_a_loss_without_guidance_run_no_negative_branch() -> None:
    guided, plain = kept(pairs_of(2)), kept(pairs_of(2, 0.5))
    unguided = kept(pairs_of(2), needs=ALL - {Need.GUIDANCE})
    assert guided.inputs.conditions is not None
    assert plain.inputs.conditions is not None
    assert unguided.inputs.conditions is not None
    assert guided.inputs.conditions.negative is not None
    assert plain.inputs.conditions.negative is unguided.inputs.conditions.negative is None
    assert unguided.inputs.guidance == Guidance()
    model = Gain(0.5)
    kept(pairs_of(2), models={"transformer": model})
    assert len(model.seen) == 2


def test_the_recorded_step_is_scored_in_closed_form() -> None:
    pairs = pairs_of(2)
    transition = kept(pairs).transition
    assert transition is not None
    assert transition.reference_mean is None
    for place, pair in enumerate(pairs):
        mean = pair.tensors[VISUAL] - 0.25 * by_hand(pair, 0.5, 3.0)
        assert torch.allclose(transition.mean[VISUAL][place], mean, atol=1e-5)
        density = torch.distributions.Normal(mean, 0.9)
        expected = density.log_prob(pair.tensors[successor(VISUAL)]).mean()
        assert transition.log_prob_B[VISUAL][place].item() == pytest.approx(
            float(expected), abs=1e-5
        )
        assert float(transition.std_dev_t_B[VISUAL][place]) == pytest.approx(1.8)


def test_a_loss_that_needs_no_transition_gets_none_and_needs_no_backend() -> None:
    assert kept(pairs_of(2), needs=frozenset(), backend=None).transition is None


def test_the_reference_scores_the_same_step_without_a_gradient() -> None:
    model = Gain(0.5)
    entered: list[tuple[str, bool, bool]] = []

    @contextmanager
    def reference(component: str) -> Iterator[None]:
        entered.append((component, model.training, torch.is_grad_enabled()))
        model.gain.data.fill_(0.25)
        yield
        model.gain.data.fill_(0.5)

    pairs = pairs_of(2)
    loss = kept(pairs, models={"transformer": model}, reference=reference)
    assert entered == [("transformer", False, False)]
    assert model.training
    assert loss.transition is not None
    assert loss.transition.reference_mean is not None
    found = loss.transition.reference_mean[VISUAL]
    assert not found.requires_grad
    for row, pair in zip(found, pairs, strict=True):
        mean = pair.tensors[VISUAL] - 0.25 * by_hand(pair, 0.25, 3.0)
        assert torch.allclose(row, mean, atol=1e-5)


def test_the_old_policy_predicts_beside_the_reference_without_a_gradient() -> None:
    model = Gain(0.5)
    entered: list[tuple[str, bool, bool]] = []

    def holding(gain: float) -> Callable[[str], AbstractContextManager[None]]:
        @contextmanager
        def policy(component: str) -> Iterator[None]:
            entered.append((component, model.training, torch.is_grad_enabled()))
            before = model.gain.data.clone()
            model.gain.data.fill_(gain)
            yield
            model.gain.data.copy_(before)

        return policy

    pairs = pairs_of(2)
    changes = {"old": holding(0.75), "reference": holding(0.25)}
    found = kept(pairs, models={"transformer": model}, **changes).predictions
    assert entered == [("transformer", False, False)] * 2
    assert model.training
    assert found.old is not None
    assert found.reference is not None
    for streams, gain in ((found.trained, 0.5), (found.old, 0.75), (found.reference, 0.25)):
        assert streams[VISUAL].requires_grad == (gain == 0.5)
        for row, pair in zip(streams[VISUAL], pairs, strict=True):
            assert torch.allclose(row, by_hand(pair, gain, 3.0), atol=1e-5)
    assert kept(pairs, reference=holding(0.25)).predictions.old is None


@pytest.mark.parametrize(
    ("policy", "dtype", "expected"),
    [
        (InputDtypes(), "bf16", (torch.float32, torch.float32)),
        (InputDtypes(latents="default"), "bf16", (torch.bfloat16, torch.float32)),
        (
            InputDtypes(latents="fp16", timestep="default"),
            "bf16",
            (torch.float16, torch.bfloat16),
        ),
        (InputDtypes(latents="default", timestep="fp32"), "fp32", (torch.float32, torch.float32)),
    ],
)
def test_inputs_have_the_dtype_that_the_family_asks_for(
    policy: InputDtypes, dtype: str, expected: tuple[torch.dtype, torch.dtype]
) -> None:
    model = Gain(0.5)
    feeding = {"transformer": Feeding(policy)}
    changes = {"models": {"transformer": model}, "feeding": feeding, "dtype": dtype}
    kept(pairs_of(1, 0.5), **changes)
    assert model.seen == [expected]


def test_a_batch_is_its_pairs_stacked_in_order() -> None:
    pairs = [replace(pair, weight=0.5 * n) for n, pair in enumerate(pairs_of(3))]
    batch = make_batch(pairs, CPU)
    assert batch.pairs == tuple(pairs)
    assert batch.weight_B.tolist() == [0.0, 0.5, 1.0]
    assert batch.values["sigma_max"].tolist() == pytest.approx([0.9] * 3)
    assert batch.timestep_B is not None
    assert batch.timestep_B.tolist() == [750.0] * 3
    assert {tensor.dtype for tensor in (batch.weight_B, batch.sigma_B)} == {torch.float32}
    for place, pair in enumerate(pairs):
        for key, tensor in pair.tensors.items():
            assert torch.equal(batch.tensors[key][place], tensor)


def test_times_that_not_every_pair_has_are_left_to_the_family() -> None:
    pairs = pairs_of(2, 0.25)
    pairs[1] = replace(pairs[1], timestep=None)
    assert make_batch(pairs, CPU).timestep_B is None
    loss = kept(pairs)
    assert loss.inputs.model_time_B is not None
    assert loss.inputs.model_time_B.tolist() == [250.0, 250.0]


def test_pairs_of_two_phases_do_not_share_a_batch() -> None:
    first, second = pairs_of(2)
    with pytest.raises(
        BatchError, match=r"mixes denoising phases \['transformer', 'transformer_2'\]"
    ):
        make_batch([first, replace(second, component="transformer_2")], CPU)


def test_conditions_are_all_there_or_none_is() -> None:
    forward = forward_of(Keeping(None, Context()))
    record = pairs_of(1)[0].condition
    assert batch_condition(forward, [None, None]) is None
    whole = batch_condition(forward, [record, record])
    assert whole is not None
    assert whole.rows == 2
    with pytest.raises(
        ContractError, match="some pairs of a micro-batch carry a condition and some"
    ):
        batch_condition(forward, [record, None])
    with pytest.raises(ContractError, match="Keeping: pairs carry no condition"):
        kept([replace(pairs_of(1)[0], condition=None, negative=None)])


def test_guidance_needs_a_negative_condition_of_every_pair() -> None:
    first, second = pairs_of(2)
    with pytest.raises(ContractError, match="carry a condition and some do not"):
        kept([first, replace(second, negative=None)])


def test_the_gradient_flows_through_the_guided_prediction() -> None:
    model = Gain(0.5)
    pairs = pairs_of(2)
    output = loss_of(
        forward_of(Keeping(None, Context()), models={"transformer": model}), pairs, StepContext()
    )
    output.loss.backward()
    expected = sum(pair.tensors[VISUAL].sum() for pair in pairs)
    assert model.gain.grad is not None
    assert float(model.gain.grad) == pytest.approx(float(expected), rel=1e-4)


class Projecting(nn.Module):
    """Velocity by a matrix product, which autocast computes in the forward dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, time_B: Tensor, text: Tensor) -> Tensor:
        projected: Tensor = self.layer(x)
        return projected


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_matrix_products_run_in_the_forward_dtype(dtype: str, expected: torch.dtype) -> None:
    changes = {"models": {"transformer": Projecting()}, "dtype": dtype}
    loss = kept(pairs_of(2, 0.5), needs=frozenset(), **changes)
    assert loss.predictions.trained[VISUAL].dtype == expected


def test_a_step_is_scored_in_float32_whatever_the_model_computes_in() -> None:
    changes = {"models": {"transformer": Projecting()}, "dtype": "bf16"}
    transition = kept(pairs_of(2, 0.5), **changes).transition
    assert transition is not None
    assert transition.mean[VISUAL].dtype == torch.float32
    assert transition.log_prob_B[VISUAL].dtype == torch.float32
