"""The embedded engine against recordings of the real sglang-diffusion server, one output per call.

Same checkpoint (tiny SD3, fp32), same request, same seed: initial latents, step noises, model outputs,
latents, sigmas, embeddings, pictures and log-probs are those of the server. On the machine that made the
recordings every one of them is bit-equal but the log-probs, which the server computes from the noise and
drl from the latents, and T5's embeddings; elsewhere last bits may differ, hence the tolerance.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from drl.api import (
    Context,
    Launch,
    LocalTensors,
    LoraFields,
    Prompt,
    RolloutRequest,
    Sample,
    Sampling,
    WeightBucket,
)
from drl.mathematics.checksum import tensors_digest
from drl.testing.golden import golden_folder
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.family import Sd3Family
from drl_sde_cps.cps import CpsSde
from drl_sde_flow.flow import FlowOde, FlowSde
from safetensors.torch import load, load_file
from torch import Tensor

msgpack = pytest.importorskip("msgpack")
Result = TypeVar("Result")

RELEASES = ("0.5.17-fp32", "0.5.23-fp32")
TOLERANCE = 1e-6
DEBUG = {
    "rollout_variance_noises": "variance_noises",
    "rollout_prev_sample_means": "prev_sample_means",
    "rollout_model_outputs": "model_outputs",
}
ROLLOUTS = (
    "sde-k1-nocfg-all",
    "sde-k1-cfg-all",
    "sde-k1-noconst",
    "cps-k1-cfg-noconst",
    "cps-k1-full",
    "ode-k1-noconst",
    "ode-k1-cfg-noconst",
    "eval-k1-nocfg",
    "eval-k1-cfg",
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
)


def folder(release: str) -> Path:
    """Return the folder of a release; skip the running test where it is absent."""
    path = golden_folder() / "sglang" / release
    if not path.is_dir():
        pytest.skip(f"no recordings at {path}; set DRL_GOLDEN")
    return path


def pipeline_folder() -> Path:
    return folder("tiny-sd3")


@cache
def exchanges(release: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the exchanges of a release by their id without its number."""
    listed = json.loads((folder(release) / "manifest.json").read_text())["exchanges"]
    return {exchange["id"].partition("-")[2]: exchange for exchange in listed}


def recorded(release: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return request and the one sample of an exchange."""
    exchange = exchanges(release)[name]
    request = json.loads((folder(release) / exchange["request"]).read_text())
    reply = msgpack.unpackb((folder(release) / exchange["response"]).read_bytes())
    (sample,) = decoded(reply)
    return request, sample


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load(value["data"])["t"]
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def launched(*, noise_level: float, no_const: bool) -> LocalEngine:
    """Start an engine of one row, as the server denoised these requests."""
    section = SimpleNamespace(type="sde", noise_level=noise_level, log_prob_no_const=no_const)
    context = Context(section=section)
    backends = {"sde": FlowSde(None, context), "ode": FlowOde(None, context)}
    if no_const:
        backends["cps"] = CpsSde(None, context)
    engine = LocalEngine(LocalOptions(rows=1), Context())
    launch = Launch(
        checkpoint=str(pipeline_folder()),
        family=Sd3Family(Sd3Options(), Context()),
        sde_backends=backends,
    )
    run(engine.start(launch))
    return engine


engine_for = cache(launched)


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(coroutine)


def in_range(steps: list[int] | None, last: int) -> tuple[int, ...] | None:
    """The server ignores step numbers out of range; the engine refuses them."""
    return None if steps is None else tuple(step for step in sorted(steps) if 0 <= step <= last)


def our_request(body: Mapping[str, Any]) -> RolloutRequest:
    """Translate a request body; CPS has its log-prob without constants here."""
    steps = body["num_inference_steps"]
    kind = body["rollout_sde_type"]
    sampling = Sampling(
        num_steps=steps,
        height=body["height"],
        width=body["width"],
        guidance_scale=body["guidance_scale"],
        true_cfg_scale=body.get("true_cfg_scale"),
        negative_prompt=body.get("negative_prompt"),
        sde_type=kind,
        noise_level=body["rollout_noise_level"],
        log_prob_no_const=body["rollout_log_prob_no_const"] or kind == "cps",
    )
    return RolloutRequest(
        prompt=Prompt(row=0, text=body["prompt"]),
        group_index=0,
        members=(0,),
        seeds=(body["seed"],),
        sampling=sampling,
        sde_steps=in_range(body.get("rollout_sde_step_indices"), steps - 1),
        kept_latents=in_range(body.get("rollout_return_step_indices"), steps),
        evaluation=not body["rollout"],
        debug=True,
    )


def made(body: Mapping[str, Any]) -> Sample:
    request = our_request(body)
    engine = engine_for(
        noise_level=request.sampling.noise_level, no_const=request.sampling.log_prob_no_const
    )
    (sample,) = run(engine.generate(request))
    return sample


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def differences(sample: Sample, reply: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference of every tensor that the server returned."""
    found = {"picture": distance(sample.media.pixels[:, 0], reply["generated_output"])}
    trajectory = sample.trajectory
    if trajectory is None:
        return found
    if reply["dit_trajectory"] is not None:
        theirs = reply["dit_trajectory"]
        found["sigmas"] = distance(trajectory.sigmas, theirs["sigmas"])
        found["latents"] = distance(trajectory.latents["visual"], theirs["latents"])
        times = torch.cat([trajectory.timesteps, torch.zeros(1)])[list(trajectory.latent_steps)]
        found["timesteps"] = distance(times, theirs["timesteps"])
    if reply["rollout_debug_tensors"] is not None:
        theirs = reply["rollout_debug_tensors"]
        for name, ours in DEBUG.items():
            found[ours] = distance(trajectory.debug[ours], theirs[name])
        stds = theirs["rollout_noise_std_devs"][:, 0]
        found["noise_std_devs"] = distance(trajectory.debug["noise_std_devs"], stds)
    return found
