"""The local engine with one fault at a time: in what it computes, or in what it hands over."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from drl.api import VISUAL, Conditions, Guidance
from drl_engine_local.engine import LocalEngine

FAULT = [""]
"""Name of the present fault; "" for none."""


class Faulty(LocalEngine):
    async def start(self, launch):
        self.base = None
        self.models = []
        return await super().start(replace(launch, family=wrapped(launch.family, self)))

    async def generate(self, request):
        return [handed_over(sample) for sample in await super().generate(request)]

    async def end_update(self, version):
        proof = await super().end_update(version)
        if FAULT[0] in {"merged in bf16", "adapters lost"}:
            await self._run(self.spoil)
        return proof

    @torch.no_grad()
    def spoil(self):
        (model,) = self.models
        for name, parameter in model.named_parameters():
            base = self.base[name].to(parameter)
            delta = (parameter - base).bfloat16()
            if FAULT[0] == "adapters lost":
                parameter.copy_(base)
            elif delta.any():
                parameter.copy_(base.bfloat16() + delta)


def wrapped(family, engine):
    twin = copy.copy(family)
    vars(twin).update(
        build=lambda component, source: built(family, engine, component, source),
        forward=lambda *inputs: forwarded(family, *inputs),
        guide=lambda *inputs: guided(family, *inputs),
        conditions=lambda *both, batched: conditioned(family, *both, batched=batched),
        condition=lambda record: family.condition(conditioned_record(record)),
        model_time=lambda sigma, timestep: timed(family, sigma, timestep),
        pipeline=lambda *where: piped(family.pipeline(*where)),
    )
    return twin


def built(family, engine, component, source):
    model = family.build(component, source)
    whole = family.build(component, replace(source, meta=False, device="cpu"))
    engine.base = {name: p.detach().clone() for name, p in whole.named_parameters()}
    engine.models.append(model)
    return model


def forwarded(family, model, streams, time_B, condition):
    if FAULT[0] == "math attention":
        with sdpa_kernel(SDPBackend.MATH):
            return family.forward(model, streams, time_B, condition)
    if FAULT[0] == "bf16 forward":
        with torch.autocast("cpu", torch.bfloat16):
            return family.forward(model, streams, time_B, condition)
    return family.forward(model, streams, time_B, condition)


def guided(family, positive, negative, guidance):
    if FAULT[0] == "other formula":
        p, u = positive[VISUAL], negative[VISUAL]
        return {VISUAL: p + (guidance.scale - 1.0) * (p - u)}
    if FAULT[0] == "exchanged":
        return family.guide(negative, positive, guidance)
    if FAULT[0] == "no guidance":
        return family.guide(positive, negative, Guidance(scale=1.0))
    if FAULT[0] == "unknown":
        return {VISUAL: family.guide(positive, negative, guidance)[VISUAL] * 1.001}
    if FAULT[0] == "nan":
        return {VISUAL: family.guide(positive, negative, guidance)[VISUAL] * float("nan")}
    return family.guide(positive, negative, guidance)


def conditioned(family, positive, negative, *, batched):
    if FAULT[0] == "joint":
        return family.conditions(positive, negative, batched=True)
    if FAULT[0] == "dropped negative":
        return Conditions(positive=positive)
    return family.conditions(positive, negative, batched=batched)


def conditioned_record(record):
    if FAULT[0] != "rounded conditions":
        return record
    return replace(record, tensors={n: t.bfloat16().float() for n, t in record.tensors.items()})


def timed(family, sigma, timestep):
    if FAULT[0] == "time from sigma":
        return sigma * 1000.0
    return family.model_time(sigma, timestep)


def piped(pipeline):
    plain = pipeline.sigmas

    def sigmas(sampling):
        return plain(replace(sampling, flow_shift=7.0) if FAULT[0] == "shift" else sampling)

    vars(pipeline)["sigmas"] = sigmas
    return pipeline


def handed_over(sample):
    path = sample.trajectory
    if path is None:
        return sample
    if FAULT[0] == "stored in bf16":
        latents = {n: t.bfloat16().float() for n, t in path.latents.items()}
        sample.trajectory = replace(path, latents=latents)
    elif FAULT[0] == "sigmas in fp16":
        sample.trajectory = replace(path, sigmas=path.sigmas.half().float())
    elif FAULT[0] == "time from sigma":
        sample.trajectory = replace(path, timesteps=path.timesteps.round() + 1.0)
    return sample
