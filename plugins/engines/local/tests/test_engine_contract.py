"""The engine contract fails on engines that ignore, reorder, embellish or forget.

Each wrong engine is the local one with one thing changed; that the local one itself passes is in
test_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in

from drl.api import (
    API_VERSION,
    Acknowledgement,
    Component,
    Engine,
    EngineCapabilities,
    Launch,
    Media,
    Memory,
    RolloutRequest,
    Sample,
    Trajectory,
    WeightBucket,
    WeightProof,
    hookimpl,
)
from drl.catalog import Catalog
from drl.testing.contracts.engine import EngineContract
from drl.testing.contracts.weights import make_bucket
from drl_engine_local.engine import LocalEngine

DRL_API = API_VERSION


class Asking(LocalEngine):
    """Changes the request before it is made."""

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        return await super().generate(self.asked(request))

    def asked(self, request: RolloutRequest) -> RolloutRequest:
        return request


class Telling(LocalEngine):
    """Changes what is told of each sample."""

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        made = await super().generate(request)
        for sample in made:
            self.told(sample, len(made))
        return made

    def told(self, sample: Sample, rows: int) -> None:
        return


def path_changed(sample: Sample, change: Callable[[Trajectory], Trajectory]) -> None:
    if sample.trajectory is not None:
        sample.trajectory = change(sample.trajectory)


class Seedless(Asking):
    """Takes its seeds from a counter."""

    calls = 0

    def asked(self, request: RolloutRequest) -> RolloutRequest:
        self.calls += 1
        return replace(request, seeds=tuple(seed + 100 * self.calls for seed in request.seeds))


class Sorting(LocalEngine):
    async def generate(self, request: RolloutRequest) -> list[Sample]:
        return sorted(await super().generate(request), key=lambda sample: sample.seed)


class Stochastic(Asking):
    """Makes every step stochastic, whatever was asked."""

    def asked(self, request: RolloutRequest) -> RolloutRequest:
        return replace(request, sde_steps=None)


class Hoarding(Asking):
    """Says that it returns parts of a trajectory and returns all of it."""

    def asked(self, request: RolloutRequest) -> RolloutRequest:
        return replace(request, kept_latents=None)


class NoisyEvaluation(Asking):
    def asked(self, request: RolloutRequest) -> RolloutRequest:
        return replace(request, evaluation=False)


class Sharing(Asking):
    """Takes the path seed for the seed, so that members of a group start apart."""

    def asked(self, request: RolloutRequest) -> RolloutRequest:
        paths = request.path_seeds
        return request if paths is None else replace(request, seeds=paths, path_seeds=None)


class Unguided(Asking):
    """Drops guidance when there is no negative prompt."""

    def asked(self, request: RolloutRequest) -> RolloutRequest:
        if request.sampling.negative_prompt is not None:
            return request
        return replace(request, sampling=replace(request.sampling, guidance_scale=1.0))


class Shortened(Telling):
    """Leaves the last latents out, which are in the picture anyway."""

    def told(self, sample: Sample, rows: int) -> None:
        path_changed(
            sample,
            lambda path: replace(
                path,
                latents={name: tensor[:-1] for name, tensor in path.latents.items()},
                latent_steps=path.latent_steps[:-1],
            ),
        )


class Inferring(Telling):
    """Hands out tensors that no trainer can put through its model."""

    def told(self, sample: Sample, rows: int) -> None:
        with torch.inference_mode():
            path_changed(
                sample,
                lambda path: replace(
                    path, latents={name: tensor.clone() for name, tensor in path.latents.items()}
                ),
            )


class Embellishing(Telling):
    """Reports log-probs that are not those of its backend."""

    def told(self, sample: Sample, rows: int) -> None:
        path_changed(sample, lambda path: replace(path, log_probs=path.log_probs * 1.001))


class Crowded(Telling):
    """Makes a picture depend on the company it was made in."""

    def told(self, sample: Sample, rows: int) -> None:
        assert sample.media is not None
        sample.media = Media(pixels=sample.media.pixels * (1 - 1e-3 * (rows - 1)))


class Mishearing(Telling):
    """Echoes the guidance it would have liked."""

    def told(self, sample: Sample, rows: int) -> None:
        sample.echo = {**sample.echo, "guidance_scale": 3.5}


class Unversioned(Telling):
    def told(self, sample: Sample, rows: int) -> None:
        sample.version = 0


class Vain(LocalEngine):
    """Says that it takes payloads nobody sends."""

    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities(), payloads=frozenset({"dense", "pickle"}))


class Deaf(LocalEngine):
    """Acknowledges weights and keeps its own."""

    async def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        return Acknowledgement(applied=bucket.names)


class Unproven(LocalEngine):
    async def end_update(self, version: int) -> WeightProof:
        proof = await super().end_update(version)
        return replace(proof, counts=dict.fromkeys(proof.counts, 0))


class Remembering(LocalEngine):
    """Proves all that ever came instead of the last update."""

    total = 0

    async def end_update(self, version: int) -> WeightProof:
        proof = await super().end_update(version)
        self.total += sum(proof.counts.values())
        return replace(proof, counts=dict.fromkeys(proof.counts, self.total))


class Polite(LocalEngine):
    """Says that it applied what it does not know."""

    async def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        await super().update_weights(bucket)
        return Acknowledgement(applied=bucket.names)


class Hasty(LocalEngine):
    """Writes every bucket at once, and cannot take it back."""

    async def update_weights(self, bucket: WeightBucket) -> Acknowledgement:
        answer = await super().update_weights(bucket)
        assert self.store is not None
        self.store.apply()
        return answer


class Forgetful(LocalEngine):
    """Loses its weights while it sleeps."""

    async def resume(self, what: Memory) -> None:
        assert self.store is not None
        if what is Memory.WEIGHTS:
            for tensor in self.store.components["transformer"].tensors.values():
                tensor.data.mul_(0.9)


class Immortal(LocalEngine):
    async def health(self, timeout_s: float) -> None:
        return


class StoppingOnce(LocalEngine):
    async def stop(self) -> None:
        assert self.launch is not None, "stopped twice"
        await super().stop()


WHOLE = "test_a_trajectory_is_whole"
PUSHED = "test_weights_pushed_are_weights_used"
PROOF = "test_the_proof_covers_what_was_pushed"
STOPPED = "test_a_stopped_engine_is_dead_and_may_be_stopped_again"

CASES: list[tuple[type[LocalEngine], str, str]] = [
    (Seedless, "test_the_same_seed_makes_the_same_sample", "same("),
    (Sorting, "test_samples_keep_the_order_of_the_request", "[3, 5, 9] == [5, 3, 9]"),
    (Stochastic, "test_only_chosen_steps_are_stochastic", "(0, 1, 2, 3) == (1,)"),
    (Hoarding, "test_kept_latents_are_found_by_number", "(0, 1, 2, 3, 4) == (1, 2, 4)"),
    (NoisyEvaluation, "test_an_evaluation_is_the_deterministic_path", "is None"),
    (Sharing, "test_path_seeds_share_the_start_and_part_the_path", "first_latents"),
    (Unguided, "test_guidance_without_negative_prompt_is_still_guidance", "is not None"),
    (Shortened, WHOLE, "(0, 1, 2, 3) == (0, 1, 2, 3, 4)"),
    (Inferring, WHOLE, "an inference tensor cannot go through a training forward"),
    (Embellishing, "test_log_probs_are_those_of_the_backend", "allclose"),
    (Crowded, "test_a_sample_does_not_depend_on_its_batch", "same("),
    (Mishearing, "test_settings_come_back_with_the_sample", "{'guidance_scale': 3.5}"),
    (Unversioned, PUSHED, "(0, 0, 1) == (0, 1, 1)"),
    (Vain, "test_capabilities_are_complete", "pickle"),
    (Deaf, PUSHED, "not True"),
    (Unproven, PROOF, "assert 0 == "),
    (Remembering, PROOF, "counts"),
    (Polite, "test_an_unknown_name_is_reported", "module."),
    (Hasty, "test_a_failed_update_leaves_the_old_version", "same("),
    (Forgetful, "test_release_and_resume_keep_results", "same("),
    (Immortal, STOPPED, "DID NOT RAISE"),
    (StoppingOnce, STOPPED, "stopped twice"),
]


@hookimpl
def drl_register_engines() -> list[Component]:
    classes = [LocalEngine, *[case[0] for case in CASES]]
    return offered(classes, config="drl_engine_local.config:LocalOptions")


class Checks(EngineContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("engine", "localengine")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"rows": 4, "wait_ms": 1}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, tiny_launch: Launch) -> dict[str, Verdict]:
    members = {"launch": pytest.fixture(lambda self: tiny_launch)}
    cases = [(wrong, check) for wrong, check, _ in CASES]
    folder = tmp_path_factory.mktemp("checks")
    return judged(Checks, folder, cases, members=members)


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_engine_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Engine], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]


class Modest(LocalEngine):
    """States that it can do less; the checks of the rest do not apply."""

    def capabilities(self) -> EngineCapabilities:
        return replace(
            super().capabilities(),
            partial_trajectory=False,
            batch_invariant=False,
            path_seeds=False,
            transactional=False,
        )


def test_what_an_engine_says_it_cannot_do_is_not_asked_of_it(
    tmp_path: Any, tiny_launch: Launch
) -> None:
    members = {
        "launch": pytest.fixture(lambda self: tiny_launch),
        "instance": pytest.fixture(lambda self, options, context: Modest(options, context)),
    }
    reasons = {
        "test_kept_latents_are_found_by_number": "the engine returns whole trajectories",
        "test_a_sample_does_not_depend_on_its_batch": "a sample depends on its microgroup",
        "test_path_seeds_share_the_start_and_part_the_path": "takes one seed per sample",
        "test_a_failed_update_leaves_the_old_version": "quarantined after a failed update",
    }
    found = judged(Checks, tmp_path, [(LocalEngine, check) for check in reasons], members=members)
    skipped = found["LocalEngine"].skipped
    assert skipped.keys() == reasons.keys()
    assert all(reasons[check] in reason for check, reason in skipped.items())


def test_a_bucket_of_the_contract_is_what_its_labels_say() -> None:
    tensors = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
    bucket = make_bucket(tensors, version=3, index=1)
    assert (bucket.shapes, bucket.dtypes) == (((2, 3), (4,)), ("float32", "bfloat16"))
    assert (bucket.payload, bucket.lora, bucket.version, bucket.index) == ("dense", None, 3, 1)
    assert len(bucket.checksum) == 64
