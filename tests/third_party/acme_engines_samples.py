"""Engines that make other samples than they were asked for, or none; each wraps the local engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from drl.api import EngineError, Media
from drl_engine_local.engine import LocalEngine

PAUSE_S = 0.03


class Slow(LocalEngine):
    """Finishes later groups first."""

    async def generate(self, request):
        await asyncio.sleep(PAUSE_S * (3 - request.group_index % 4))
        return await super().generate(request)


class Hanging(LocalEngine):
    """Never answers."""

    async def generate(self, request):
        await asyncio.sleep(3600)


class Failing(LocalEngine):
    """Fails in its third request, while others are at work."""

    requests = 0

    async def generate(self, request):
        self.requests += 1
        if self.requests == 3:
            await asyncio.sleep(PAUSE_S)
            raise EngineError("acme: out of memory")
        return await super().generate(request)


class Crashing(LocalEngine):
    """Fails with an error that is nobody's contract."""

    async def generate(self, request):
        raise ZeroDivisionError("acme: division by zero")


class OtherShift(LocalEngine):
    """Leaves the shift out of its schedule and does not say so."""

    async def generate(self, request):
        own = replace(request, sampling=replace(request.sampling, flow_shift=1.0))
        return [
            replace(sample, echo=sample.echo | {"flow_shift": request.sampling.flow_shift})
            for sample in await super().generate(own)
        ]


class OtherGuidance(LocalEngine):
    """Uses a guidance of its own, and says so."""

    async def generate(self, request):
        return await super().generate(
            replace(request, sampling=replace(request.sampling, guidance_scale=6.0))
        )


class OtherWindow(LocalEngine):
    """Draws the stochastic steps for itself."""

    async def generate(self, request):
        first = request.sde_steps[0]
        moved = (first + 1, first + 2) if first < 2 else (0, 1)
        return await super().generate(replace(request, sde_steps=moved, kept_latents=None))


class OtherWeights(LocalEngine):
    """Denoises with weights that are not those it was given."""

    async def start(self, launch):
        info = await super().start(launch)
        model = self.sampler.models["transformer"]
        weight = model.proj_out.weight  # shared with the trainer: other memory, not other values
        weight.data = weight.data * 1.01
        return info


class Altering(LocalEngine):
    """Hands out changed samples."""

    async def generate(self, request):
        return [self.alter(sample) for sample in await super().generate(request)]


class Silent(Altering):
    """Promises to echo every setting, and echoes one."""

    def alter(self, sample):
        return replace(sample, echo={"num_steps": sample.echo["num_steps"]})


class WrongSeed(Altering):
    def alter(self, sample):
        return replace(sample, seed=sample.seed + 1)


class WrongSize(Altering):
    def alter(self, sample):
        return replace(sample, media=Media(pixels=sample.media.pixels[..., ::2]))


class WrongVersion(Altering):
    def alter(self, sample):
        return replace(sample, version=sample.version - 1)


class WrongMember(Altering):
    def alter(self, sample):
        return replace(sample, group_index=sample.group_index ^ 1)


class OneShort(LocalEngine):
    async def generate(self, request):
        return (await super().generate(request))[1:]
