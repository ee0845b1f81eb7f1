"""Recordings of the real sglang-diffusion server, and an engine that answers the same requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from drl.api import Context, Launch, Prompt, RolloutRequest, Sample, Sampling
from drl.testing.golden import golden_folder
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.family import Sd3Family
from drl_sde_cps.cps import CpsSde
from drl_sde_flow.flow import FlowOde, FlowSde

msgpack = pytest.importorskip("msgpack")
Result = TypeVar("Result")


@cache
def on_intel() -> bool:
    """True on a processor of the maker whose arithmetic the recordings have."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()


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
    assert exchange["status"] == 200
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
    """Start an engine that works as the server does: one row at a time, large pictures in tiles."""
    section = SimpleNamespace(type="sde", noise_level=noise_level, log_prob_no_const=no_const)
    context = Context(section=section)
    backends = {"sde": FlowSde(None, context), "ode": FlowOde(None, context)}
    if no_const:
        backends["cps"] = CpsSde(None, context)
    engine = LocalEngine(LocalOptions.model_validate({"rows": 1}), Context())
    launch = Launch(
        checkpoint=str(pipeline_folder()),
        family=Sd3Family(
            Sd3Options.model_validate({"tiled_decode": True, "decode_rows": 1}), Context()
        ),
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


def engine_of(request: RolloutRequest) -> LocalEngine:
    sampling = request.sampling
    return engine_for(noise_level=sampling.noise_level, no_const=sampling.log_prob_no_const)


def made(body: Mapping[str, Any]) -> Sample:
    request = our_request(body)
    (sample,) = run(engine_of(request).generate(request))
    return sample


def picture(sample: Sample) -> Tensor:
    """Return the picture ``(3, H, W)``."""
    assert sample.media is not None
    return sample.media.pixels[:, 0]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference; equal shapes, and NaN where the other has NaN."""
    assert ours.shape == theirs.shape
    assert torch.equal(ours.isnan(), theirs.isnan())
    return float((ours - theirs).nan_to_num().abs().max()) if ours.numel() else 0.0
