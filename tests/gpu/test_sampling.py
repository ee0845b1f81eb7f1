"""The sampler of engine ``local`` on the device: nothing waits in its loop, and nothing changes its bits.

Bits: whoever shares a batch, whether kernels are launched one by one or as a CUDA graph, and however late
pictures arrive.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.runs import no_waiting
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from drl.api import Context, Launch, Prompt, RolloutRequest, Sample, Sampling, WeightSource
from drl.catalog import Catalog
from drl.cluster.ranks_wire import dumps
from drl.dumps import read_dump, write_dump
from drl.mathematics.gaussian import row_mean
from drl.testing.contracts.weights import make_bucket
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_engine_local.noise import RowNoise
from drl_engine_local.schedule import Row

pytestmark = pytest.mark.gpu

ROWS, STEPS = 4, 4
LOOP = "drl denoising loop"
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SETTINGS = Sampling(
    num_steps=STEPS,
    height=32,
    width=32,
    guidance_scale=4.5,
    sde_type="sde",
    noise_level=0.7,
)


def launch_on(device: str, checkpoint: Path, **changes: Any) -> Launch:
    """Return what an engine is started with on the device, in bfloat16 unless changed."""
    catalog = Catalog.load()
    model = catalog.options_model("family", "sd3")
    assert model is not None
    family = catalog.create("family", "sd3", model(), Context(device=device))
    section = SimpleNamespace(noise_level=0.7, log_prob_no_const=False)
    backends = {
        kind: catalog.create("sde_backend", kind, None, Context(section=section))
        for kind in ("sde", "ode")
    }
    fields: dict[str, Any] = {"dtype": "bf16", "batched_guidance": True} | changes
    return Launch(
        checkpoint=str(checkpoint), family=family, sde_backends=backends, device=device, **fields
    )


@contextmanager
def started(launch: Launch, **options: Any) -> Iterator[LocalEngine]:
    """Start an engine, and stop it whatever happens."""
    settings = {"rows": ROWS, "wait_ms": 20, "weights": "forward", **options}
    engine = LocalEngine(LocalOptions.model_validate(settings), Context())
    asyncio.run(engine.start(launch))
    try:
        yield engine
    finally:
        asyncio.run(engine.stop())


def request_for(*seeds: int, text: str = "a sign", **changes: Any) -> RolloutRequest:
    fields: dict[str, Any] = {"sampling": SETTINGS, "group_index": 0} | changes
    return RolloutRequest(
        prompt=Prompt(row=0, text=text), members=tuple(range(len(seeds))), seeds=seeds, **fields
    )


def made(engine: LocalEngine, *requests: RolloutRequest) -> list[list[Sample]]:
    async def together() -> list[list[Sample]]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(together())


def content(sample: Sample) -> dict[str, Tensor]:
    """Return latents, log-probs and picture, on the CPU."""
    assert sample.media is not None
    found = {"pixels": sample.media.pixels}
    if sample.trajectory is not None:
        found["latents"] = sample.trajectory.latents["visual"].cpu()
        found["log_probs"] = sample.trajectory.log_probs
    return found


def unequal(one: Sample, other: Sample) -> list[str]:
    mine, theirs = content(one), content(other)
    assert mine.keys() == theirs.keys()
    return [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]


@pytest.fixture
def engine(device: str, checkpoint: Path) -> Iterator[LocalEngine]:
    with started(launch_on(device, checkpoint)) as made_engine:
        yield made_engine


@pytest.mark.parametrize("home", ["cpu", "device"])
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_loop_never_waits(engine: LocalEngine, device: str, home: str, guidance: float) -> None:
    where = device if home == "device" else "cpu"
    sampling = replace(SETTINGS, generator_device=where, guidance_scale=guidance)
    sampler = engine.sampler
    assert sampler is not None
    requests = (
        request_for(1, 2, sampling=sampling),
        request_for(3, sampling=sampling, sde_steps=(1,), debug=True),
    )
    rows = [Row(request, place) for request in requests for place in range(len(request.seeds))]
    records = [sampler._records(row) for row in rows]
    with torch.no_grad():
        for _ in range(2):  # the first batch loads kernels and takes pinned memory
            batch = sampler.batch(rows, records)
            with no_waiting(device):
                path = sampler.denoise(batch)
    assert bool(path.last.isfinite().all())


def test_the_profiler_sees_no_wait_and_no_copy_to_the_host(
    engine: LocalEngine, device: str
) -> None:
    if not device.startswith("cuda"):
        pytest.skip("what the CUDA runtime is asked for needs a GPU")
    sampler = engine.sampler
    assert sampler is not None
    rows = [Row(request_for(1, 2, 3, 4), place) for place in range(ROWS)]
    records = [sampler._records(row) for row in rows]
    with torch.no_grad():
        sampler.denoise(sampler.batch(rows, records))
        batch = sampler.batch(rows, records)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            with record_function(LOOP):
                sampler.denoise(batch)
            torch.cuda.synchronize()
    events = trace.events()
    assert events is not None
    (loop,) = [
        event.time_range
        for event in events
        if event.name == LOOP and event.device_type == torch.autograd.DeviceType.CPU
    ]
    inside = [
        event.name
        for event in events
        if event.device_type == torch.autograd.DeviceType.CPU
        and loop.start <= event.time_range.start <= loop.end
    ]
    assert [name for name in inside if name in WAITING] == []
    assert any(name.startswith("cudaLaunchKernel") for name in inside), sorted(set(inside))
    assert [event.name for event in events if "DtoH" in event.name] == []


def test_launching_a_batch_does_not_wait_for_its_pictures(engine: LocalEngine, device: str) -> None:
    sampler = engine.sampler
    assert sampler is not None
    rows = [Row(request_for(1, 2, 3, 4), place) for place in range(ROWS)]
    first = sampler.launch(rows, version=0).samples()
    with no_waiting(device):
        late = sampler.launch(rows, version=0)
    assert [unequal(*pair) for pair in zip(first, late.samples(), strict=True)] == [[]] * ROWS


def test_tensors_lie_where_the_next_stage_needs_them(engine: LocalEngine, device: str) -> None:
    ((sample, *_),) = made(engine, request_for(1, 2, debug=True))
    path = sample.trajectory
    assert path is not None
    assert sample.media is not None
    assert sample.condition is not None
    for tensor in (path.sigmas, path.timesteps, path.log_probs, sample.media.pixels):
        assert tensor.device.type == "cpu"
        assert not tensor.is_pinned()  # pinned memory serves the next batch
    for tensor in (*path.latents.values(), *path.debug.values()):
        assert tensor.device.type == torch.device(device).type
    assert 0.0 <= float(sample.media.pixels.min()) <= float(sample.media.pixels.max()) <= 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sample_has_its_bits_whoever_shares_its_batch(
    device: str, checkpoint: Path, dtype: str
) -> None:
    with started(launch_on(device, checkpoint, dtype=dtype)) as engine:
        ((alone,),) = made(engine, request_for(50, text="the one"))
        for count in (1, 3, 6):
            crowd = [request_for(n, text=f"sign {n}", sde_steps=(n % 4,)) for n in range(count)]
            crowd.insert(count // 2, request_for(50, text="the one"))
            assert unequal(made(engine, *crowd)[count // 2][0], alone) == []


@pytest.mark.parametrize("shape", [(16, 64, 64), (4, 16, 16), (7, 5, 3)])
def test_a_row_has_its_mean_bit_for_bit_in_a_batch_of_any_size(
    device: str, shape: tuple[int, ...]
) -> None:
    rows = torch.randn(16, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    alone = torch.cat([row_mean(row[None]) for row in rows])
    for count in range(1, 17):
        assert torch.equal(row_mean(rows[:count]), alone[:count])


def test_noise_in_place_is_the_noise_of_a_tensor_of_its_own(
    engine: LocalEngine, device: str
) -> None:
    sampler = engine.sampler
    assert sampler is not None
    sampling = replace(SETTINGS, generator_device=device)
    noise = RowNoise(
        sampler.pipeline, sampling, seed=3, path_seed=None, stream="visual", device=device
    )
    shape = noise.initial.shape
    into = torch.empty((3, *shape), device=device)
    noise.draw(into[1])
    generator = torch.Generator(device).manual_seed(3)
    drawn = [torch.randn((1, *shape), generator=generator, device=device)[0] for _ in range(2)]
    assert torch.equal(noise.initial, drawn[0])
    assert torch.equal(into[1], drawn[1])


def test_many_batches_in_line_come_back_in_order(engine: LocalEngine) -> None:
    requests = [request_for(*range(6 * k, 6 * k + 6), text=f"sign {k}") for k in range(5)]
    together = made(engine, *requests)
    for request, samples in zip(requests, together, strict=True):
        assert [sample.seed for sample in samples] == list(request.seeds)
        (again,) = made(engine, request)
        assert [unequal(*pair) for pair in zip(samples, again, strict=True)] == [[]] * 6
    counts = engine.counts()
    assert counts["rows"] - counts["filler_rows"] == 60.0


def test_samples_of_the_device_leave_the_process_whole(engine: LocalEngine, tmp_path: Path) -> None:
    ((sample, _),) = made(engine, request_for(1, 2, debug=True))
    path = tmp_path / "samples.safetensors"
    write_dump(path, "rollout", {"samples": [sample]})
    assert sample.trajectory is not None
    assert sample.condition is not None
    for arrived in (
        read_dump(path, "rollout")["samples"][0],  # a file
        pickle.loads(dumps([sample]))[0],  # another process
    ):
        assert unequal(sample, arrived) == []
        pairs = [
            (sample.trajectory.debug, arrived.trajectory.debug),
            (sample.condition.tensors, arrived.condition.tensors),
        ]
        for here, there in pairs:
            assert here.keys() == there.keys()
            for name, tensor in here.items():
                assert there[name].device.type == "cpu"
                assert torch.equal(tensor.cpu(), there[name])


def pushed(engine: LocalEngine, tensors: Mapping[str, Tensor], version: int) -> None:
    asyncio.run(engine.begin_update(version))
    asyncio.run(engine.update_weights(make_bucket(tensors, version=version)))
    asyncio.run(engine.end_update(version))


@pytest.fixture
def cuda(device: str) -> str:
    """The device under test, which must be a GPU."""
    if not device.startswith("cuda"):
        pytest.skip("CUDA graphs need a GPU")
    return device


@pytest.mark.parametrize(
    ("batched", "compiled"),
    [(True, False), (False, False), (True, True)],
    ids=["one forward", "two forwards", "compiled"],
)
def test_a_graph_has_the_bits_of_its_kernels(
    cuda: str, checkpoint: Path, batched: bool, compiled: bool
) -> None:
    launch = launch_on(cuda, checkpoint, batched_guidance=batched)
    requests = [
        request_for(1, 2, 3),
        request_for(4, text="another", sampling=replace(SETTINGS, guidance_scale=1.0)),
        request_for(5, evaluation=True, sampling=replace(SETTINGS, width=48, num_steps=2)),
    ]
    model = launch.family.build("transformer", WeightSource(checkpoint=str(checkpoint)))
    generator = torch.Generator().manual_seed(0)
    shaken = {
        name: tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.named_parameters()
    }
    with (
        started(launch, compile=compiled) as plain,
        started(launch, compile=compiled, cuda_graphs=True) as graphs,
    ):
        for version in (1, 2):
            wanted, got = made(plain, *requests), made(graphs, *requests)
            for theirs, ours in zip(wanted, got, strict=True):
                assert [unequal(*pair) for pair in zip(theirs, ours, strict=True)] == [
                    [] for _ in ours
                ]
            assert graphs.counts()["recorded_graphs"] == len(requests)
            for engine in (plain, graphs):  # written in place: the same graphs show the new weights
                pushed(engine, {name: version * tensor for name, tensor in shaken.items()}, version)
        assert graphs.counts().get("recompilations", 0.0) == 0.0


def test_graphs_give_their_memory_back(cuda: str, checkpoint: Path) -> None:
    with started(launch_on(cuda, checkpoint), cuda_graphs=True) as engine:
        sampler = engine.sampler
        assert sampler is not None
        assert sampler.graphs is not None
        ((before,),) = made(engine, request_for(1))
        torch.cuda.synchronize()
        held = torch.cuda.memory_reserved()
        sampler.graphs.forget()
        assert torch.cuda.memory_reserved() < held
        ((after,),) = made(engine, request_for(1))
        assert unequal(before, after) == []
        assert engine.counts()["recorded_graphs"] == 2.0
