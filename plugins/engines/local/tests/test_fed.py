"""Engine and trainer feed and finish a model alike, whatever a family asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.api import (
    Conditions,
    Context,
    ContractError,
    Family,
    Guidance,
    InputDtypes,
    Launch,
    RolloutRequest,
    Sampling,
    Streams,
    TrainPipelineConfig,
    WeightSource,
)
from drl.lora import LoraConfig, inject
from drl.mathematics.feeding import Feeding, guidance_by_option
from drl.model.shared import shared_tensors
from drl.stages.loss import Forward, predict
from drl.types import ForwardInputs
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_family_sd3.family import Sd3Family


class Particular(Sd3Family):
    """A family with wishes of its own; remembers what reached its model."""

    wishes: dict[str, Any]
    guidances: list[Guidance]
    inputs: list[tuple[torch.dtype, torch.dtype, torch.dtype, float]]

    def pipeline_config(self, component: str, config: dict[str, Any]) -> TrainPipelineConfig:
        return replace(super().pipeline_config(component, config), **self.wishes)

    def predict(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        conditions: Conditions,
        guidance: Guidance,
    ) -> Streams:
        assert model_time_B is not None
        text = conditions.positive.arguments["encoder_hidden_states"]
        self.guidances.append(guidance)
        self.inputs.append(
            (streams["visual"].dtype, model_time_B.dtype, text.dtype, model_time_B[0].item())
        )
        return super().predict(model, streams, model_time_B, conditions, guidance)


class WithTable(Sd3Family):
    """Makes in ``finish`` what is no parameter and no buffer."""

    def build(self, component: str, source: WeightSource) -> nn.Module:
        module = super().build(component, source)
        module.table = torch.full((), 2.0, device="meta" if source.meta else source.device)  # type: ignore[assignment]
        return module

    def finish(self, component: str, module: nn.Module) -> None:
        module.table = torch.full((), 2.0)  # type: ignore[assignment]

    def forward(self, model: nn.Module, *inputs: Any) -> Streams:
        table: Any = model.table
        return {name: one * table for name, one in super().forward(model, *inputs).items()}


class Forgetful(WithTable):
    """Leaves its table without values."""

    def finish(self, component: str, module: nn.Module) -> None:
        return


def particular(family: Family, **wishes: Any) -> Particular:
    made = Particular(family.options, family.context)
    made.wishes, made.guidances, made.inputs = wishes, [], []
    return made


@contextmanager
def started(launch: Launch) -> Iterator[LocalEngine]:
    engine = LocalEngine(LocalOptions.model_validate({"rows": 4, "wait_ms": 2}), Context())
    asyncio.run(engine.start(launch))
    yield engine
    asyncio.run(engine.stop())


POLICY = InputDtypes(latents="default", timestep="default", condition="fp16")


def test_engine_and_trainer_feed_the_same_numbers(
    tiny_launch: Launch, family: Family, request_for: Callable[..., RolloutRequest]
) -> None:
    wanting = particular(family, input_dtypes=POLICY)
    with started(replace(tiny_launch, family=wanting, dtype="bf16")) as engine:
        (made,) = asyncio.run(engine.generate(request_for(1)))
        rolled = list(wanting.inputs)
        model = engine.sampler.models["transformer"]  # type: ignore[union-attr]
    assert {dtypes[:3] for dtypes in rolled} == {(torch.bfloat16, torch.bfloat16, torch.float16)}
    config = wanting.pipeline_config("transformer", {})
    forward = Forward(
        family=wanting,
        models={"transformer": model},
        loss=None,  # type: ignore[arg-type]
        backend=None,
        device=torch.device("cpu"),
        dtype="bf16",
        guidance={},
        feeding={"transformer": Feeding.of(config)},
    )
    assert made.trajectory is not None
    assert made.condition is not None
    condition = wanting.condition(made.condition)
    batch: Any = SimpleNamespace(pairs=[SimpleNamespace(component="transformer")])
    wanting.inputs.clear()
    for number in range(len(rolled)):
        inputs = ForwardInputs(
            streams={"visual": made.trajectory.latents["visual"][number : number + 1]},
            model_time_B=made.trajectory.timesteps[number : number + 1].clone(),
            guidance=Guidance(),
            conditions=wanting.conditions(condition, None, batched=False),
        )
        with torch.no_grad():
            predict(forward, batch, inputs)
    assert wanting.inputs == rolled


@pytest.mark.parametrize("scales", [{"true_cfg_scale": 1.0}, {"true_cfg_scale": None}, {}])
def test_engine_and_trainer_tell_a_model_the_same_guidance(
    tiny_launch: Launch,
    family: Family,
    sampling: Sampling,
    request_for: Callable[..., RolloutRequest],
    scales: dict[str, Any],
) -> None:
    wanting = particular(family, joint_guidance=True)
    given = replace(sampling, guidance_scale=3.5, **scales)
    with started(replace(tiny_launch, family=wanting)) as engine:
        asyncio.run(engine.generate(request_for(1, sampling=given)))
    trained = replace(guidance_by_option(given)["guidance_scale"], joint=True)
    assert set(wanting.guidances) == {trained}


@pytest.mark.parametrize("shared", [False, True])
def test_a_family_finishes_the_engines_model_too(
    tiny_launch: Launch,
    family: Family,
    request_for: Callable[..., RolloutRequest],
    shared: bool,
) -> None:
    plain, table = (made(family.options, family.context) for made in (Sd3Family, WithTable))
    first = []
    for one in (plain, table):
        launch = replace(tiny_launch, family=one)
        with started(replace(launch, shared=weights_of(launch) if shared else {})) as engine:
            (made,) = asyncio.run(engine.generate(request_for(1, debug=True)))
        assert made.trajectory is not None
        assert made.trajectory.debug is not None
        first.append(made.trajectory.debug["model_outputs"][0])
    assert torch.equal(first[1], 2 * first[0])


def test_a_model_that_is_not_finished_is_refused(tiny_launch: Launch, family: Family) -> None:
    launch = replace(tiny_launch, family=Forgetful(family.options, family.context))
    with (
        pytest.raises(ContractError, match=r"1 tensors have no values, for example table; Family"),
        started(replace(launch, shared=weights_of(launch))),
    ):
        pass


def weights_of(launch: Launch) -> dict[str, dict[str, Tensor]]:
    """Return the frozen weights of a trainer with adapters."""
    module = launch.family.build("transformer", WeightSource(checkpoint=launch.checkpoint))
    config = LoraConfig(rank=2, alpha=2.0, target_modules=("attn.to_q",))
    inject(module, config, generator=torch.Generator())
    return {"transformer": dict(shared_tensors(module, "cpu"))}
