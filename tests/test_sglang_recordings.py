"""The embedded engine against recordings of the real sglang-diffusion server, one output per call.

Same checkpoint (tiny SD3, fp32), same request, same seed: initial latents, step noises, model outputs,
latents, sigmas, embeddings, pictures and log-probs are those of the server. Two comparisons, because the
last bits of a matrix product (and with Intel's MKL even of a square root) depend on the CPU's maker:

- with the recordings, made on an Intel processor: within 1e-6 on another one (0.0 where it was tried);
  elsewhere within 1e-6 of the largest value for one prediction, and guidance ``u + g (p - u)``
  multiplies the rounding of its two predictions by up to ``2 g - 1``, and so does the tolerance;
- with a replay written here from the contract and plain diffusers, on the machine of the test: 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from recordings import (
    distance,
    engine_of,
    launched,
    made,
    on_intel,
    our_request,
    picture,
    pipeline_folder,
    recorded,
    run,
)
from safetensors.torch import load_file
from torch import Tensor

from drl.api import ConditionRecord, LocalTensors, LoraFields, Sample, WeightBucket
from drl.mathematics.checksum import tensors_digest
from drl_engine_local.engine import LocalEngine

RELEASES = ("0.5.17-fp32", "0.5.23-fp32")
TOLERANCE = 1e-6
PICTURE_TOLERANCE = 1e-5
"""1/400 of a grey level: the VAE on latents whose last bits already differ."""
LATER = ("sde-k1-cfg-all", "cps-k1-cfg-noconst", "ode-k1-cfg-noconst", "sde-window-0-2")
"""Compared with the later release too; its recordings are those of the earlier one, bit for bit."""
LOG_SQRT_2_PI = math.log(math.sqrt(2 * math.pi))
ROLLOUTS = [
    "sde-k1-nocfg-all",
    "sde-k1-cfg-all",
    "sde-k1-noconst",
    "cps-k1-cfg-noconst",
    "cps-k1-full",
    "ode-k1-noconst",
    "ode-k1-cfg-noconst",
    "sde-k1-small-seed7",
    "sde-k1-small-seed8",
    "sde-k1-small-seed9",
    "sde-window-0-2",
    "sde-window-0-3",
    "sde-window-empty",
    "sde-window-outside",
    "sde-return-none",
    "cps-window-1-3",
    "sde-noise-0.3",
    "sde-noise-1.0",
    "sde-notraj-nodebug",
    "sde-traj-only",
    "nonsquare",
    "t1",
    "t2",
    "neg-prompt",
    "neg-prompt-empty",
    "true-cfg",
    "unicode",
    "empty-prompt",
    "guidance-0",
]


def allowed(theirs: Tensor, body: Mapping[str, Any]) -> float:
    """Return the tolerance of the module's docstring."""
    if on_intel():
        return TOLERANCE
    scale = max(body["guidance_scale"], body.get("true_cfg_scale") or 0.0)
    amplification = 2 * scale - 1 if scale > 1 else 1.0
    return TOLERANCE * amplification * max(1.0, float(theirs.abs().max()) if theirs.numel() else 0)


def returned(reply: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what the server sent of a trajectory, under the names of ``kept``."""
    found: dict[str, Tensor] = dict(reply["dit_trajectory"] or {})
    for name, tensor in (reply["rollout_debug_tensors"] or {}).items():
        found[name.removeprefix("rollout_")] = tensor
    if "noise_std_devs" in found:
        found["noise_std_devs"] = found["noise_std_devs"][:, 0]
    return found


def kept(sample: Sample) -> dict[str, Tensor]:
    """Return what the engine keeps of a trajectory."""
    trajectory = sample.trajectory
    assert trajectory is not None
    times = torch.cat(
        [trajectory.timesteps, torch.zeros(1)]
    )  # the server gives the final latents 0
    return {
        "sigmas": trajectory.sigmas,
        "timesteps": times[list(trajectory.latent_steps)],
        "latents": trajectory.latents["visual"],
        **trajectory.debug,
    }


@pytest.mark.parametrize(
    ("name", "release"),
    [(name, RELEASES[0]) for name in ROLLOUTS] + [(name, RELEASES[1]) for name in LATER],
)
def test_a_rollout_is_the_servers(name: str, release: str) -> None:
    body, reply = recorded(release, f"rollout-{name}")
    sample = made(body)
    ours = kept(sample)
    theirs = returned(reply)
    found = {key: distance(ours[key], tensor) for key, tensor in theirs.items()}
    assert {key: found[key] for key in found if found[key] > allowed(theirs[key], body)} == {}
    assert distance(picture(sample), reply["generated_output"]) < PICTURE_TOLERANCE


@pytest.mark.parametrize("name", ["eval-k1-nocfg", "eval-k1-cfg"])
def test_an_evaluation_is_the_servers(name: str) -> None:
    body, reply = recorded(RELEASES[0], f"rollout-{name}")
    sample = made(body)
    assert sample.trajectory is None
    assert distance(picture(sample), reply["generated_output"]) < PICTURE_TOLERANCE


@pytest.mark.parametrize("name", ROLLOUTS)
def test_log_probs_from_latents_are_the_servers_from_noise(name: str) -> None:
    body, reply = recorded(RELEASES[0], f"rollout-{name}")
    trajectory = made(body).trajectory
    assert trajectory is not None
    ours = trajectory.log_probs
    if body["rollout_sde_type"] == "cps" and not body["rollout_log_prob_no_const"]:
        ours = with_constants(ours, trajectory.debug["noise_std_devs"], trajectory.sde_steps)
    assert distance(ours, reply["rollout_log_probs"]) <= TOLERANCE


def with_constants(log_probs: Tensor, stds: Tensor, stochastic: tuple[int, ...]) -> Tensor:
    """Turn ``mean -(x - m)^2`` into the full Gaussian on stochastic steps; NaN where std is 0."""
    full = log_probs / (2 * stds**2) - stds.log() - LOG_SQRT_2_PI
    full[stds == 0] = math.nan
    steps = [step in stochastic for step in range(len(log_probs))]
    return torch.where(torch.tensor(steps), full, torch.zeros(()))


@pytest.mark.parametrize("name", ["sde-k1-cfg-all", "neg-prompt"])
def test_embeddings_are_the_servers(name: str) -> None:
    body, reply = recorded(RELEASES[0], f"rollout-{name}")
    sample = made(body)
    for ours, theirs in (
        (sample.condition, reply["denoising_env"]["pos_cond_kwargs"]),
        (sample.negative, reply["denoising_env"]["neg_cond_kwargs"]),
    ):
        assert ours is not None
        text, pooled = "encoder_hidden_states", "pooled_projections"
        clip = 77  # first tokens: CLIP; behind them T5
        assert distance(ours.tensors[pooled], theirs[pooled]) <= TOLERANCE
        assert distance(ours.tensors[text][:clip], theirs[text][:clip]) <= 2 * TOLERANCE
        allowed_t5 = TOLERANCE if on_intel() else 1e-5
        assert distance(ours.tensors[text][clip:], theirs[text][clip:]) <= allowed_t5


@pytest.mark.parametrize("name", ["sde-k1-nocfg-all", "cps-k1-cfg-noconst", "t2", "nonsquare"])
def test_decoding_the_servers_latents_gives_its_picture(name: str) -> None:
    body, reply = recorded(RELEASES[0], f"rollout-{name}")
    request = our_request(body)
    sampler = engine_of(request).sampler
    assert sampler is not None
    (media,) = sampler.pipeline.decode({"visual": reply["dit_trajectory"]["latents"][-1:]})
    assert distance(media.pixels[:, 0], reply["generated_output"]) <= TOLERANCE


@torch.no_grad()
def replayed(body: Mapping[str, Any], sample: Sample) -> list[Tensor]:
    """Return the latents by sections 5 and 7 of the server's contract, with diffusers' own model."""
    models: Any = SD3Transformer2DModel
    model = models.from_pretrained(pipeline_folder(), subfolder="transformer").eval()
    generator = torch.Generator().manual_seed(body["seed"])
    assert sample.trajectory is not None
    sigmas, times = sample.trajectory.sigmas, sample.trajectory.timesteps
    shape = (1, 16, body["height"] // 8, body["width"] // 8)
    latents = [torch.randn(shape, generator=generator)]
    for i in range(len(times)):
        s, n, x = sigmas[i], sigmas[i + 1], latents[-1]
        v = predicted(model, x, times[i], sample.condition)
        if sample.negative is not None:
            u = predicted(model, x, times[i], sample.negative)
            v = u + body["guidance_scale"] * (v - u)
        if body["rollout_sde_type"] == "ode":
            latents.append(x + (n - s) * v)
            continue
        rule = sde_rule if body["rollout_sde_type"] == "sde" else cps_rule
        mean, std = rule(x, v, s, n, sigmas[1], body["rollout_noise_level"])
        latents.append(mean + std * torch.randn(shape, generator=generator))
    return latents


def predicted(model: Any, x: Tensor, time: Tensor, record: ConditionRecord | None) -> Tensor:
    assert record is not None
    rows = {name: tensor[None] for name, tensor in record.tensors.items()}
    output: Tensor = model(x, timestep=time[None], **rows, return_dict=False)[0]
    return output


def sde_rule(
    x: Tensor, v: Tensor, s: Tensor, n: Tensor, largest: Tensor, a: float
) -> tuple[Tensor, Tensor]:
    d = n - s
    below_one = largest if math.isclose(float(s), 1.0, rel_tol=1e-5) else s
    std = a * torch.sqrt(s / (1 - below_one))
    mean = x * (1 + std**2 / (2 * s) * d) + v * (1 + std**2 * (1 - s) / (2 * s)) * d
    return mean, std * torch.sqrt(-d)


def cps_rule(
    x: Tensor, v: Tensor, s: Tensor, n: Tensor, largest: Tensor, a: float
) -> tuple[Tensor, Tensor]:
    std = n * math.sin(a * math.pi / 2)
    mean = (x - s * v) * (1 - n) + (x + v * (1 - s)) * torch.sqrt(n**2 - std**2)
    return mean, std


@pytest.mark.parametrize(
    "name",
    ["sde-k1-nocfg-all", "sde-k1-cfg-all", "cps-k1-cfg-noconst", "ode-k1-cfg-noconst", "nonsquare"],
)
def test_a_replay_with_plain_diffusers_is_bit_equal(name: str) -> None:
    body, _ = recorded(RELEASES[0], f"rollout-{name}")
    sample = made(body)
    assert sample.trajectory is not None
    ours = sample.trajectory.latents["visual"]
    assert distance(ours, torch.cat(replayed(body, sample))) == 0.0


def pushed(engine: LocalEngine, tensors: Mapping[str, Tensor], lora: LoraFields | None) -> None:
    """Push tensors in two buckets, pairs of A and B together."""
    version = engine.version + 1
    names = sorted(tensors)
    middle = len(names) // 4 * 2
    run(engine.begin_update(version))
    for index, part in enumerate((names[:middle], names[middle:])):
        carried = tuple(tensors[name] for name in part)
        bucket = WeightBucket(
            component="transformer",
            version=version,
            index=index,
            payload="dense" if lora is None else "lora_merge",
            names=tuple(part),
            shapes=tuple(tuple(tensor.shape) for tensor in carried),
            dtypes=("float32",) * len(part),
            checksum=tensors_digest(part, carried),
            carrier=LocalTensors(tensors=carried),
            lora=lora,
        )
        assert run(engine.update_weights(bucket)).unexpected == ()
    assert run(engine.end_update(version)).counts == {"transformer": len(names)}


def base_weights() -> dict[str, Tensor]:
    folder = pipeline_folder() / "transformer" / "diffusion_pytorch_model.safetensors"
    return {k: v for k, v in load_file(folder).items() if k != "pos_embed.pos_embed"}


def new_weights() -> dict[str, Tensor]:
    """The full update of the recordings' README."""
    g = torch.Generator().manual_seed(123)
    return {
        name: tensor * 1.01 + 0.01 * torch.randn(tensor.shape, generator=g)
        for name, tensor in sorted(base_weights().items())
    }


def adapter(seed: int, *, zero: bool = False) -> dict[str, Tensor]:
    """Adapter 1 (seed 5) of the recordings' README: rank 4, every attention projection."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(base_weights().items()):
        if ".attn" in name and weight.ndim == 2:
            layer, (out, columns) = name.removesuffix(".weight"), weight.shape
            tensors[f"{layer}.lora_A"] = 0.1 * torch.randn(4, columns, generator=g)
            B = 0.1 * torch.randn(out, 4, generator=g)
            tensors[f"{layer}.lora_B"] = torch.zeros_like(B) if zero else B
    return tensors


def test_after_each_kind_of_update_rollouts_are_the_servers() -> None:
    lora = LoraFields(rank=4, alpha=8.0)
    engine = launched(noise_level=0.7, no_const=False)
    for name, update in (
        ("w0", None),
        ("w1", (new_weights(), None)),
        ("w0-again", (base_weights(), None)),
        ("w0-zero-b", (adapter(5, zero=True), lora)),
        ("w-lora-1", (adapter(5), lora)),
    ):
        if update is not None:
            pushed(engine, *update)
        body, reply = recorded(RELEASES[0], f"rollout-{name}")
        (sample,) = run(engine.generate(our_request(body)))
        theirs = reply["dit_trajectory"]["latents"]
        assert sample.trajectory is not None
        assert distance(sample.trajectory.latents["visual"], theirs) <= allowed(theirs, body), name
    run(engine.stop())
