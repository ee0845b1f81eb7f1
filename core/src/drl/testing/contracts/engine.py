"""``EngineContract``: what every rollout engine keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from drl.errors import EngineDead, EngineError
from drl.interfaces.engine import (
    Engine,
    EngineCapabilities,
    Launch,
    LoraFields,
    Memory,
    WeightProof,
)
from drl.interfaces.family import WeightSource
from drl.mathematics.checksum import tensors_digest
from drl.model.shared import tensors_by_name
from drl.testing.builders import make_prompt
from drl.testing.contracts.base import ContractBase
from drl.testing.contracts.rescoring import rescored
from drl.testing.contracts.weights import adapter_of, first_linear, make_bucket, shaken
from drl.types import RolloutRequest, Sample, Sampling, Trajectory

Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Result]], Result]
TOLERANCE = 1e-5
"""Log-probs recomputed at another row count: other matrix kernels, so other last bits."""


class EngineContract(ContractBase):
    """Seeds, order, trajectories and weight updates of one engine, on a model of toy size.

    The author overrides ``launch``: what the engine is started with; its ``family`` can build the model
    here too. ``sampling`` may be overridden; its ``sde_type`` must have a density. What the engine says in
    its capabilities decides which tests apply.
    """

    @pytest.fixture
    def launch(self) -> Launch:
        """What the engine is started with."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture launch")

    @pytest.fixture
    def sampling(self) -> Sampling:
        """Settings of the requests, as the launched SDE backends have them."""
        return Sampling(
            num_steps=4, height=32, width=32, guidance_scale=2.0, sde_type="sde", noise_level=0.7
        )

    @pytest.fixture
    def run(self) -> Iterator[Run[Any]]:
        """Run a coroutine to its end; all on one event loop, as a pool does."""
        loop = asyncio.new_event_loop()
        yield loop.run_until_complete
        loop.close()

    @pytest.fixture
    def engine(self, instance: Engine, launch: Launch, run: Run[Any]) -> Iterator[Engine]:
        """The started engine."""
        run(instance.start(launch))
        yield instance
        run(instance.stop())

    @pytest.fixture
    def able(self, engine: Engine) -> EngineCapabilities:
        """What the started engine can do."""
        return engine.capabilities()

    @pytest.fixture
    def model(self, launch: Launch) -> nn.Module:
        """The model as a trainer of this process has it."""
        source = WeightSource(checkpoint=launch.checkpoint, device=launch.device)
        return launch.family.build(launch.components[0], source)

    @pytest.fixture
    def ask(self, engine: Engine, sampling: Sampling, run: Run[Any]) -> Callable[..., list[Sample]]:
        """Generate samples of one prompt by their seeds."""

        def asked(*seeds: int, **changes: Any) -> list[Sample]:
            settings = changes.pop("sampling", sampling)
            made: list[Sample] = run(engine.generate(request_of(settings, seeds, **changes)))
            return made

        return asked

    @pytest.fixture
    def push(self, engine: Engine, launch: Launch, run: Run[Any]) -> Callable[..., WeightProof]:
        """Make one whole update of one bucket."""

        def pushed(
            tensors: Mapping[str, Tensor], version: int, lora: LoraFields | None = None
        ) -> WeightProof:
            name = launch.components[0]
            run(engine.begin_update(version))
            bucket = make_bucket(tensors, version=version, component=name, lora=lora)
            run(engine.update_weights(bucket))
            proof: WeightProof = run(engine.end_update(version))
            return proof

        return pushed

    def test_capabilities_are_complete(self, able: EngineCapabilities, sampling: Sampling) -> None:
        assert able.transports
        assert able.payloads
        assert able.payloads <= {"dense", "lora_merge"}
        assert able.proof in ("counts", "names", "checksum")
        assert sampling.sde_type in able.sde_types
        assert able.echoes <= set(asdict(sampling))

    def test_the_same_seed_makes_the_same_sample(self, ask: Callable[..., list[Sample]]) -> None:
        (first,), (again,), (other,) = ask(7), ask(7), ask(8)
        assert same(first, again)
        assert not same(first, other)

    def test_samples_keep_the_order_of_the_request(self, ask: Callable[..., list[Sample]]) -> None:
        made = ask(5, 3, 9)
        assert [sample.seed for sample in made] == [5, 3, 9]
        assert [sample.member for sample in made] == [0, 1, 2]
        assert {sample.group_index for sample in made} == {0}
        pictures = [sample.media.pixels for sample in made if sample.media is not None]
        assert {(one.dtype, one.device.type) for one in pictures} == {(torch.float32, "cpu")}
        assert not any(torch.equal(pictures[0], other) for other in pictures[1:])

    def test_a_trajectory_is_whole(
        self, ask: Callable[..., list[Sample]], sampling: Sampling, launch: Launch
    ) -> None:
        path = path_of(ask(7)[0])
        steps = sampling.num_steps
        assert path.latent_steps == tuple(range(steps + 1))
        assert path.sde_steps == tuple(range(steps))
        assert path.timesteps.shape == path.log_probs.shape == (steps,)
        assert path.sigmas.shape == (steps + 1,)
        assert float(path.sigmas[-1]) == 0.0
        assert bool((path.sigmas[1:] < path.sigmas[:-1]).all())
        numbers = (path.sigmas, path.timesteps, path.log_probs)
        assert {tensor.device.type for tensor in numbers} == {"cpu"}
        for tensor in (*path.latents.values(), *numbers):
            assert tensor.dtype == torch.float32
            assert tensor.device.type in ("cpu", torch.device(launch.device).type)
            assert bool(torch.isfinite(tensor).all())
            assert not tensor.is_inference(), (
                "an inference tensor cannot go through a training forward"
            )

    def test_log_probs_are_those_of_the_backend(
        self, ask: Callable[..., list[Sample]], launch: Launch, model: nn.Module
    ) -> None:
        for sample in ask(7, 8):
            recomputed = rescored(sample, launch, model)
            assert torch.allclose(recomputed, path_of(sample).log_probs, atol=TOLERANCE)

    def test_only_chosen_steps_are_stochastic(self, ask: Callable[..., list[Sample]]) -> None:
        path = path_of(ask(7, sde_steps=(1,))[0])
        assert path.sde_steps == (1,)
        assert [float(value) != 0.0 for value in path.log_probs] == [False, True, False, False]
        deterministic = path_of(ask(7, sde_steps=())[0])
        assert float(deterministic.log_probs.abs().max()) == 0.0
        assert torch.equal(first_latents(path), first_latents(deterministic))

    def test_kept_latents_are_found_by_number(
        self, able: EngineCapabilities, ask: Callable[..., list[Sample]]
    ) -> None:
        if not able.partial_trajectory:
            pytest.skip("the engine returns whole trajectories")
        whole, part = path_of(ask(7)[0]), path_of(ask(7, kept_latents=(1, 2, 4))[0])
        assert part.latent_steps == (1, 2, 4)
        for number in part.latent_steps:
            for name, tensor in part.at(number).items():
                assert torch.equal(tensor, whole.at(number)[name])
        none = path_of(ask(7, kept_latents=())[0])
        assert {len(tensor) for tensor in none.latents.values()} == {0}

    def test_an_evaluation_is_the_deterministic_path(
        self, ask: Callable[..., list[Sample]]
    ) -> None:
        (evaluated,), (path,) = ask(7, evaluation=True), ask(7, sde_steps=())
        assert evaluated.trajectory is None
        assert evaluated.media is not None
        assert path.media is not None
        assert torch.allclose(evaluated.media.pixels, path.media.pixels, atol=1e-6)

    def test_a_sample_does_not_depend_on_its_batch(
        self,
        able: EngineCapabilities,
        engine: Engine,
        sampling: Sampling,
        ask: Callable[..., list[Sample]],
        run: Run[Any],
    ) -> None:
        if not able.batch_invariant:
            pytest.skip("the engine says that a sample depends on its microgroup")
        (alone,) = ask(7)
        assert same(ask(1, 2, 7, 3, 4)[2], alone)
        crowd = [
            request_of(sampling, (seed,), text=f"prompt {seed}", sde_steps=(seed % 4,))
            for seed in range(3)
        ]
        crowd.insert(1, request_of(sampling, (7,)))
        made = run(gathered(engine, crowd))
        assert same(made[1][0], alone)

    def test_path_seeds_share_the_start_and_part_the_path(
        self, able: EngineCapabilities, ask: Callable[..., list[Sample]]
    ) -> None:
        if not able.path_seeds:
            pytest.skip("the engine takes one seed per sample")
        plain = ask(7)[0]
        one, two = ask(7, 7, path_seeds=(7, 8))
        assert same(one, plain)
        assert torch.equal(first_latents(path_of(one)), first_latents(path_of(two)))
        assert not same(one, two)
        assert (two.seed, two.path_seed) == (7, 8)

    def test_settings_come_back_with_the_sample(
        self, able: EngineCapabilities, ask: Callable[..., list[Sample]], sampling: Sampling
    ) -> None:
        (sample,) = ask(7)
        asked = asdict(sampling)
        assert {name: sample.echo[name] for name in able.echoes} == {
            name: asked[name] for name in able.echoes
        }

    def test_guidance_without_negative_prompt_is_still_guidance(
        self, ask: Callable[..., list[Sample]], sampling: Sampling
    ) -> None:
        guided = ask(7, sampling=replace(sampling, guidance_scale=4.0, negative_prompt=None))[0]
        plain = ask(7, sampling=replace(sampling, guidance_scale=1.0))[0]
        assert guided.negative is not None
        assert plain.negative is None
        assert not same(guided, plain)

    def test_weights_pushed_are_weights_used(
        self,
        ask: Callable[..., list[Sample]],
        push: Callable[..., WeightProof],
        launch: Launch,
        model: nn.Module,
    ) -> None:
        before = ask(7)[0]
        original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        changed = shaken(model)
        proof = push(changed, 1)
        after = ask(7)[0]
        assert (before.version, after.version, proof.version) == (0, 1, 1)
        assert not same(before, after)
        assert torch.allclose(
            rescored(after, launch, model), path_of(after).log_probs, atol=TOLERANCE
        )
        push(original, 2)
        assert same(ask(7)[0], before)

    def test_the_proof_covers_what_was_pushed(
        self,
        able: EngineCapabilities,
        push: Callable[..., WeightProof],
        launch: Launch,
        model: nn.Module,
    ) -> None:
        name = launch.components[0]
        changed = shaken(model)
        first, second = push(changed, 1), push(changed, 2)
        assert first.counts[name] == len(changed)
        assert second.counts == first.counts
        if able.proof == "checksum":
            assert first.checksums[name] == tensors_digest(changed, changed.values())
            assert second.checksums == first.checksums

    def test_an_unknown_name_is_reported(
        self, engine: Engine, launch: Launch, model: nn.Module, run: Run[Any]
    ) -> None:
        name, tensor = next(iter(shaken(model).items()))
        run(engine.begin_update(1))
        bucket = make_bucket(
            {name: tensor, f"module.{name}": tensor}, version=1, component=launch.components[0]
        )
        answer = run(engine.update_weights(bucket))
        assert answer.applied == (name,)
        assert answer.unexpected == (f"module.{name}",)
        assert run(engine.end_update(1)).counts == {launch.components[0]: 1}

    def test_a_failed_update_leaves_the_old_version(
        self,
        able: EngineCapabilities,
        engine: Engine,
        ask: Callable[..., list[Sample]],
        launch: Launch,
        model: nn.Module,
        run: Run[Any],
    ) -> None:
        if not able.transactional:
            pytest.skip("the engine is quarantined after a failed update")
        before = ask(7)[0]
        name = launch.components[0]
        run(engine.begin_update(1))
        run(engine.update_weights(make_bucket(shaken(model), version=1, component=name)))
        wrong = {next(iter(dict(model.named_parameters()))): torch.zeros(3, 1, 2)}
        with pytest.raises(EngineError):
            run(engine.update_weights(make_bucket(wrong, version=1, component=name)))
        after = ask(7)[0]
        assert after.version == 0
        assert same(before, after)

    def test_release_and_resume_keep_results(
        self, engine: Engine, ask: Callable[..., list[Sample]], run: Run[Any]
    ) -> None:
        before = ask(7)[0]
        for what in (Memory.REST, Memory.WEIGHTS):
            run(engine.release(what))
        for what in (Memory.WEIGHTS, Memory.REST):
            run(engine.resume(what))
        assert same(ask(7)[0], before)

    def test_shared_weights_are_read_and_never_written(
        self, instance: Engine, launch: Launch, model: nn.Module, sampling: Sampling, run: Run[Any]
    ) -> None:
        if not instance.capabilities().shares_weights:
            pytest.skip("the engine holds weights of its own")
        name, layer = launch.components[0], first_linear(model)
        shared = {key: one.detach() for key, one in tensors_by_name(model).items()}
        before = tensors_digest(shared, shared.values())
        targets = {name: (layer,)}
        run(instance.start(replace(launch, shared={name: shared}, lora_targets=targets)))
        assert instance.capabilities().shares_weights
        pictures = []
        for version in (1, 2):
            run(instance.begin_update(version))
            factors = adapter_of(model, layer, seed=version)
            lora = LoraFields(rank=2, alpha=2.0)
            bucket = make_bucket(factors, version=version, component=name, lora=lora)
            run(instance.update_weights(bucket))
            run(instance.end_update(version))
            pictures += run(instance.generate(request_of(sampling, (7,))))
        run(instance.stop())
        assert not same(*pictures)
        assert tensors_digest(shared, shared.values()) == before

    def test_a_stopped_engine_is_dead_and_may_be_stopped_again(
        self, engine: Engine, run: Run[Any]
    ) -> None:
        run(engine.health(5.0))
        run(engine.stop())
        run(engine.stop())
        with pytest.raises(EngineDead):
            run(engine.health(5.0))


def request_of(
    sampling: Sampling, seeds: tuple[int, ...], text: str = "a sign", **changes: Any
) -> RolloutRequest:
    """Return a request for one sample per seed."""
    fields: dict[str, Any] = {"sampling": sampling} | changes
    return RolloutRequest(
        prompt=make_prompt(text),
        group_index=0,
        members=tuple(range(len(seeds))),
        seeds=seeds,
        **fields,
    )


async def gathered(engine: Engine, requests: list[RolloutRequest]) -> list[list[Sample]]:
    """Send all requests at once."""
    return await asyncio.gather(*[engine.generate(request) for request in requests])


def path_of(sample: Sample) -> Trajectory:
    """Return the trajectory, which must be there."""
    assert sample.trajectory is not None
    return sample.trajectory


def first_latents(path: Trajectory) -> Tensor:
    """Return the initial latents."""
    return torch.cat([tensor.flatten() for tensor in path.at(0).values()])


def same(one: Sample, other: Sample) -> bool:
    """Say whether two samples are equal bit for bit: latents, log-probs and picture."""
    a, b = path_of(one), path_of(other)
    assert one.media is not None
    assert other.media is not None
    return (
        all(torch.equal(tensor, b.latents[name]) for name, tensor in a.latents.items())
        and torch.equal(a.log_probs, b.log_probs)
        and torch.equal(one.media.pixels, other.media.pixels)
    )
