"""Pair batch to loss: forward (family), transition (SDE backend), formula (loss).

Everything that calls the model is here: guidance, autocast, the reference pass. A loss never sees
the model, a family never sees an advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from drl.errors import BadInput, ContractError
from drl.mathematics.feeding import DTYPES, Feeding, routed
from drl.mathematics.transfer import columns
from drl.stages.alignment import with_alignment
from drl.stages.mode import EvaluationModes
from drl.stages.upload import Records, make_batch, not_there
from drl.types import (
    Condition,
    ConditionRecord,
    ForwardInputs,
    Guidance,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    Shard,
    StepContext,
    Streams,
    Transition,
    successor,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from drl.interfaces.family import Family
    from drl.interfaces.loss import Loss
    from drl.interfaces.steps import SdeBackend

PolicyContext = Callable[[str], AbstractContextManager[None]]

OLD = "log_prob_old"
ENGINE = "log_prob_rollout"
"""Value of a pair: the engine's log-prob, where the trainer has taken the place of the old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward needs besides its pairs: model, mathematics, precision, guidance.

    ``guidance`` by the route's option name; ``feeding`` by component, where a family has wishes;
    ``batched_guidance``: both predictions of guidance in one forward.
    ``old``, ``reference``: a context, by component, in which the model is the old policy, or the
    reference; None when no such pass runs. ``records``: conditions that are on the device.
    ``evaluation``: a context, by component, in which its model is in evaluation mode.
    """

    family: Family
    models: Mapping[str, nn.Module]
    loss: Loss
    backend: SdeBackend | None
    device: torch.device
    dtype: str
    guidance: Mapping[str, Guidance]
    feeding: Mapping[str, Feeding] = field(default_factory=dict)
    batched_guidance: bool = False
    old: PolicyContext | None = None
    reference: PolicyContext | None = None
    records: Records = field(init=False)
    evaluation: EvaluationModes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", Records(self.device))
        object.__setattr__(self, "evaluation", EvaluationModes(self.models))

    def fed(self, batch: PairBatch) -> Feeding:
        """Return how the component of a batch is fed."""
        return self.feeding.get(batch.pairs[0].component, Feeding())

    def autocast(self) -> AbstractContextManager[object]:
        """Return autocast at the forward dtype; nothing in float32."""
        if self.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.dtype])


def value_of(pair: Pair, name: str) -> float:
    """Return one value of a pair; BatchError when it has none of that name."""
    if name not in pair.values:
        raise not_there(name, pair.values)
    return pair.values[name]


def loss_of(forward: Forward, pairs: Sequence[Pair], context: StepContext) -> LossOutput:
    """Run one micro-batch: inputs, predictions, transition, formula."""
    batch = make_batch(pairs, forward.device)
    inputs = complete_inputs(forward, batch, forward.loss.prepare(batch, context))
    predictions = Predictions(
        trained=predict(forward, batch, inputs),
        old=predict_as(forward.old, forward, batch, inputs),
        reference=predict_as(forward.reference, forward, batch, inputs),
    )
    transition = score_transition(forward, batch, predictions)
    if forward.loss.recomputes_old_log_prob and context.window == 0 and transition is not None:
        batch = own_old_log_prob(batch, transition)
    output = forward.loss.compute(batch, inputs, predictions, transition)
    return with_components(forward, batch, with_alignment(batch, predictions, output))


def own_old_log_prob(batch: PairBatch, transition: ScoredTransition) -> PairBatch:
    """Return the batch with its new log-prob, without gradient, as the old one."""
    new_B = transition.joint_log_prob.detach()
    return replace(batch, values={**batch.values, OLD: new_B, ENGINE: batch.values[OLD]})


def with_components(forward: Forward, batch: PairBatch, output: LossOutput) -> LossOutput:
    """Log some metrics under the name of the batch's component too, when there are several."""
    if len(forward.models) == 1:
        return output
    component = batch.pairs[0].component
    twins = {
        f"{name}_{component}": metric
        for name, metric in output.metrics.items()
        if metric.by_component
    }
    return replace(output, metrics={**output.metrics, **twins})


def score_pairs(
    forward: Forward, pairs: Sequence[Pair], context: StepContext
) -> ScoredTransition | None:
    """Score the recorded steps under the present weights; None for losses without a transition."""
    batch = make_batch(pairs, forward.device)
    inputs = complete_inputs(forward, batch, forward.loss.prepare(batch, context))
    predictions = Predictions(trained=predict(forward, batch, inputs))
    return score_transition(forward, batch, predictions)


def complete_inputs(forward: Forward, batch: PairBatch, inputs: ForwardInputs) -> ForwardInputs:
    """Add what core knows and the loss does not: conditions, model time, guidance."""
    family = forward.family
    time_B, rows = inputs.model_time_B, inputs.rows_per_pair
    if time_B is None:
        time_B = family.model_time(batch.sigma_B, batch.timestep_B).repeat(rows)
    guidance = guidance_of(forward, batch)
    condition = batch_condition(forward, [pair.condition for pair in batch.pairs], rows)
    if condition is None:
        raise ContractError(f"{type(forward.loss).__name__}: pairs carry no condition")
    negatives = [pair.negative for pair in batch.pairs]
    negative = batch_condition(forward, negatives, rows) if guidance.on else None
    return replace(
        inputs,
        model_time_B=time_B,
        guidance=guidance,
        conditions=family.conditions(condition, negative, batched=forward.batched_guidance),
    )


def guidance_of(forward: Forward, batch: PairBatch) -> Guidance:
    """Return the guidance of this batch's phase; off for losses that do not ask for it."""
    if Need.GUIDANCE not in forward.loss.needs:
        return Guidance()
    timestep = batch.pairs[0].timestep
    route = forward.family.route(timestep if timestep is not None else 0.0)
    return routed(forward.guidance, route.guidance_option, forward.fed(batch))


def batch_condition(
    forward: Forward, records: Sequence[ConditionRecord | None], rows_per_pair: int = 1
) -> Condition | None:
    """Collate wire records, that many times over, into one batch of forward arguments on the device."""
    known = [record for record in records if record is not None]
    if not known:
        return None
    if len(known) != len(records):
        raise ContractError("some pairs of a micro-batch carry a condition and some do not")
    rows = [forward.family.condition(forward.records.on_device(record)) for record in known]
    return forward.family.collate(rows * rows_per_pair)


def predict(forward: Forward, batch: PairBatch, inputs: ForwardInputs) -> Streams:
    """Return the velocity of the trained weights, guided when guidance is on."""
    model = forward.models[batch.pairs[0].component]
    assert inputs.conditions is not None
    assert inputs.model_time_B is not None
    with forward.autocast():
        streams, time_B, conditions = forward.fed(batch).cast(
            DTYPES[forward.dtype], inputs.streams, inputs.model_time_B, inputs.conditions
        )
        return forward.family.predict(model, streams, time_B, conditions, inputs.guidance)


def predict_as(
    policy: PolicyContext | None, forward: Forward, batch: PairBatch, inputs: ForwardInputs
) -> Streams | None:
    """Predict with the weights of another policy: no gradient, dropout off; None without one."""
    if policy is None:
        return None
    component = batch.pairs[0].component
    with forward.evaluation(component), torch.no_grad(), policy(component):
        return predict(forward, batch, inputs)


def score_transition(
    forward: Forward, batch: PairBatch, predictions: Predictions
) -> ScoredTransition | None:
    """Score the recorded next latents under the trained weights, per stream, in float32."""
    if Need.TRANSITION not in forward.loss.needs:
        return None
    assert forward.backend is not None
    mean, std, log_prob, reference = {}, {}, {}, {}
    for stream, velocity in predictions.trained.items():
        step = _transition(forward.backend, batch, stream, velocity)
        mean[stream], std[stream] = step.mean, step.std_dev_t
        log_prob[stream] = forward.backend.log_prob(batch.tensors[successor(stream)], step)
        if predictions.reference is not None:
            other = predictions.reference[stream]
            reference[stream] = _transition(forward.backend, batch, stream, other).mean
    return ScoredTransition(
        mean=mean, std_dev_t_B=std, log_prob_B=log_prob, reference_mean=reference or None
    )


def check_noise(forward: Forward, shard: Shard) -> None:
    """Raise BadInput for a recorded step without noise, where the loss divides by it.

    Before training and on the CPU: in a micro-batch the host would have to wait for the answer.
    """
    if not forward.loss.divides_by_noise or forward.backend is None:
        return
    pairs = [pair for window in shard.windows for batch in window for pair in batch]
    steps = {
        (pair.sigma, value_of(pair, "sigma_next"), value_of(pair, "sigma_max")): pair.id
        for pair in reversed(pairs)
    }
    if not steps:
        return
    sigma_B, next_B, max_B = columns(list(zip(*steps, strict=True)), torch.device("cpu"))
    nothing = torch.zeros(len(steps), 1)
    step = forward.backend.transition(nothing, nothing, sigma_B, next_B, sigma_max_B=max_B)
    still = [
        pair_id
        for pair_id, std in zip(steps.values(), step.std_dev_t.tolist(), strict=True)
        if std == 0
    ]
    if still:
        raise BadInput(
            "algorithm.kl_beta is above 0, but the pairs (sample, step) "
            f"{still[:8]} have no noise to divide the KL by; keep the last step out of the stochastic "
            "steps, or set algorithm.kl_beta = 0"
        )


def _transition(backend: SdeBackend, batch: PairBatch, stream: str, velocity: Tensor) -> Transition:
    return backend.transition(
        batch.tensors[stream],
        velocity,
        batch.sigma_B,
        batch.values["sigma_next"],
        sigma_max_B=batch.values["sigma_max"],
    )
