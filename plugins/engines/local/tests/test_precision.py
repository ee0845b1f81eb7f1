"""Engine local under a bf16 forward: what is rounded, and what stays float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from drl.api import Context, Launch, RolloutRequest, Trajectory, WeightSource
from drl.mathematics.checksum import tensors_digest
from drl.testing.contracts.weights import make_bucket
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine


@pytest.fixture(params=["fp32", "forward"])
def low(request: pytest.FixtureRequest, tiny_launch: Launch) -> Iterator[LocalEngine]:
    """An engine with a bf16 forward, its weights in fp32 or in bf16."""
    options = LocalOptions.model_validate({"rows": 4, "weights": request.param})
    engine = LocalEngine(options, Context())
    asyncio.run(engine.start(replace(tiny_launch, dtype="bf16")))
    yield engine
    asyncio.run(engine.stop())


@pytest.fixture
def path(low: LocalEngine, request_for: Callable[..., RolloutRequest]) -> Trajectory:
    (sample,) = asyncio.run(low.generate(request_for(7, debug=True)))
    assert sample.trajectory is not None
    return sample.trajectory


def is_bf16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.bfloat16().float(), tensor)


def test_latents_are_rounded_to_the_models_output_but_not_the_first(path: Trajectory) -> None:
    latents = path.latents["visual"]
    assert latents.dtype == torch.float32
    assert not is_bf16(latents[0])
    assert is_bf16(latents[1:])
    assert is_bf16(path.debug["model_outputs"])
    assert not is_bf16(path.debug["prev_sample_means"])


def test_log_probs_score_the_rounded_latents(path: Trajectory) -> None:
    residual = path.latents["visual"][1:] - path.debug["prev_sample_means"]
    std = path.debug["noise_std_devs"]
    scaled = (residual / std.reshape(-1, 1, 1, 1)) ** 2 / 2
    expected = -scaled.mean((1, 2, 3)) - std.log() - 0.9189385
    assert torch.allclose(path.log_probs, expected, rtol=1e-5, atol=1e-5)


def test_the_engine_keeps_weights_as_its_option_says(low: LocalEngine) -> None:
    assert low.store is not None
    held = low.store.components["transformer"].tensors
    expected = torch.float32 if low.options.weights == "fp32" else torch.bfloat16
    assert held["proj_out.weight"].dtype == expected
    assert held["pos_embed.pos_embed"].dtype == torch.float32


def test_a_dense_push_is_proved_as_sent_and_held_in_the_engines_precision(
    low: LocalEngine, tiny_launch: Launch, checkpoint: str
) -> None:
    model = tiny_launch.family.build("transformer", WeightSource(checkpoint=checkpoint))
    pushed = {name: tensor.detach() * 1.1 for name, tensor in model.named_parameters()}
    asyncio.run(low.begin_update(1))
    asyncio.run(low.update_weights(make_bucket(pushed, version=1)))
    proof = asyncio.run(low.end_update(1))
    assert proof.checksums == {"transformer": tensors_digest(pushed, pushed.values())}
    assert low.store is not None
    held = low.store.components["transformer"].tensors
    assert all(torch.equal(held[name], tensor.to(held[name])) for name, tensor in pushed.items())
