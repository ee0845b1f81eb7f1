"""The engine's parts on their own: waiting rows, requests' rows, steps, what it says of itself."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from drl.api import (
    BadInput,
    Context,
    EngineCapabilities,
    EngineDead,
    EngineError,
    Launch,
    Prompt,
    RolloutRequest,
    Sampling,
)
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_engine_local.result import Step
from drl_engine_local.sampler import rounded
from drl_engine_local.schedule import Row, check_request
from drl_engine_local.waiting import Job, WaitingRows

SAMPLING = Sampling(num_steps=4, height=32, width=32, sde_type="sde", noise_level=0.7)


def row(seed: int = 0, sampling: Sampling = SAMPLING, **changes: Any) -> Row:
    request = RolloutRequest(
        prompt=Prompt(row=0, text="a sign"),
        group_index=0,
        members=(0,),
        seeds=(seed,),
        sampling=sampling,
        **changes,
    )
    return Row(request, 0)


def idle() -> bool:
    return False


def jobs(*rows: Row) -> list[Job]:
    return [Job(one) for one in rows]


def test_a_batch_takes_its_own_row_first_and_then_who_waited_longest() -> None:
    waiting = WaitingRows(3, 0.0, idle)
    made = jobs(*(row(seed) for seed in range(5)))
    waiting.add(made)
    assert waiting.batch_with(made[3]) == [made[3], made[0], made[1]]
    waiting.remove(made[:2])
    assert waiting.batch_with(made[3]) == [made[3], made[2], made[4]]


def test_rows_of_other_settings_or_done_already_are_left_out() -> None:
    waiting = WaitingRows(4, 0.0, idle)
    same, done, longer, scored, negative = jobs(
        row(1),
        row(2),
        row(3, replace(SAMPLING, num_steps=5)),
        row(4, evaluation=True),
        row(5, replace(SAMPLING, negative_prompt="blurred")),
    )
    done.launched = True
    waiting.add([longer, done, scored, negative, same])
    (own,) = jobs(row(0))
    assert waiting.batch_with(own) == [own, negative, same]


def test_a_full_batch_does_not_wait_and_one_that_is_not_waits_for_a_burst() -> None:
    waiting = WaitingRows(3, 30.0, idle)
    made = jobs(row(0), row(1), row(2))
    waiting.add(made)
    start = time.monotonic()
    assert waiting.batch_with(made[0]) == made
    assert time.monotonic() - start < 5
    late = WaitingRows(3, 30.0, idle)
    late.add(made[:1])
    for place in (1, 2):
        threading.Timer(0.02 * place, late.add, [made[place : place + 1]]).start()
    assert late.batch_with(made[0]) == made
    assert time.monotonic() - start < 10


def test_a_batch_of_one_takes_nobody_else() -> None:
    waiting = WaitingRows(1, 30.0, idle)
    made = jobs(row(0), row(1))
    waiting.add(made)
    assert waiting.batch_with(made[1]) == [made[1]]


def test_steps_and_latents_that_a_request_does_not_name_are_all_of_them() -> None:
    plain, chosen = row(), row(sde_steps=(1,), kept_latents=())
    assert (plain.stochastic_steps, plain.kept_latents) == ((0, 1, 2, 3), (0, 1, 2, 3, 4))
    assert (chosen.stochastic_steps, chosen.kept_latents) == ((1,), ())
    scored = row(evaluation=True, sde_steps=(1,))
    assert (scored.kind, scored.stochastic_steps) == ("ode", ())
    ode = row(0, replace(SAMPLING, sde_type="ode"))
    assert ode.stochastic_steps == ()


def test_what_may_differ_within_a_batch_and_what_may_not() -> None:
    assert row(1, sde_steps=(1,)).key == row(2, kept_latents=()).key
    for field, value in asdict(SAMPLING).items():
        if field == "negative_prompt":
            continue
        other = value + 1 if isinstance(value, (int, float)) else "other"
        assert row(0, replace(SAMPLING, **{field: other})).key != row().key, field


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sde_steps": (0, 4, -1)}, r"sde_steps has \[4, -1\]; allowed are 0 to 3"),
        ({"kept_latents": (4, 5)}, r"kept_latents has \[5\]; allowed are 0 to 4"),
        ({"seeds": ()}, "got 0 seeds for 1 members"),
        ({"seeds": (1, 2)}, "got 2 seeds for 1 members"),
        ({"path_seeds": (1, 2)}, "one seed per member"),
        (
            {"seeds": (1, 1), "members": (0, 1), "group_index": 9},
            r"seeds \(1, 1\) repeat: two samples of group 9 would be the same picture",
        ),
    ],
)
def test_a_request_that_contradicts_itself_is_refused_before_it_waits(
    tiny_launch: Launch, changes: dict[str, Any], said: str
) -> None:
    request = replace(row().request, **changes)
    with pytest.raises(BadInput, match=said):
        check_request(request, tiny_launch.sde_backends)


def test_one_seed_with_two_paths_is_two_samples(tiny_launch: Launch) -> None:
    request = replace(row().request, members=(0, 1), seeds=(1, 1), path_seeds=(1, 2))
    check_request(request, tiny_launch.sde_backends)


def test_every_setting_of_a_backend_is_compared_with_the_request(tiny_launch: Launch) -> None:
    asked = replace(SAMPLING, noise_level=0.5, log_prob_no_const=True)
    with pytest.raises(EngineError) as refusal:
        check_request(row(0, asked).request, tiny_launch.sde_backends)
    assert "sde.noise_level: asked 0.5, held 0.7" in str(refusal.value)
    assert "sde.log_prob_no_const: asked True, held False" in str(refusal.value)
    check_request(row(0, asked, evaluation=True).request, tiny_launch.sde_backends)


def step(value: float) -> Step:
    whole, per_row = torch.full((2, 3), value), torch.full((2,), value)
    return Step(whole, whole, whole, per_row, whole, per_row)


def test_a_mixed_step_is_noisy_in_its_rows_and_plain_in_the_others() -> None:
    mixed = step(1.0).where(torch.tensor([True, False]), step(0.0))
    for tensor in (mixed.next_latents, mixed.mean, mixed.noise):
        assert tensor.tolist() == [[1.0] * 3, [0.0] * 3]
    assert mixed.noise_std_B.tolist() == mixed.log_prob_B.tolist() == [1.0, 0.0]
    assert mixed.velocity.tolist() == [[1.0] * 3] * 2


def test_latents_are_rounded_as_the_model_rounds_and_stay_float32() -> None:
    value = torch.tensor([1.0 + 2**-9])
    assert rounded(value, torch.zeros(1, dtype=torch.bfloat16)).tolist() == [1.0]
    assert rounded(value, torch.zeros(1)).tolist() == value.tolist()
    assert rounded(value, torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32


def engine() -> LocalEngine:
    return LocalEngine(LocalOptions.model_validate({"rows": 4, "wait_ms": 1}), Context())


def test_it_promises_before_the_start_and_tells_after_it(tiny_launch: Launch) -> None:
    made = engine()
    assert made.capabilities() == EngineCapabilities(
        model_layout="diffusers",
        transports=frozenset({"local"}),
        payloads=frozenset({"dense", "lora_merge"}),
        can_mix_payloads=True,
        proof="checksum",
        transactional=True,
        echoes=frozenset(asdict(SAMPLING)),
        sde_types=frozenset(),  # whatever it is launched with
        partial_trajectory=True,
        path_seeds=True,
        debug_tensors=True,
        batch_invariant=True,
        sleeps=True,
        shares_weights=True,
    )
    info = asyncio.run(made.start(tiny_launch))
    assert info.pids == (os.getpid(),)
    assert info.address == f"local://{os.getpid()}/{id(made)}"
    assert made.capabilities().sde_types == frozenset({"sde", "ode"})
    assert not made.capabilities().shares_weights  # it was given none
    with pytest.raises(EngineError, match="was started already; make another one"):
        asyncio.run(made.start(tiny_launch))
    asyncio.run(made.stop())


def test_a_family_without_a_sampling_half_is_refused(tiny_launch: Launch) -> None:
    family = type(tiny_launch.family)

    class Half(family):  # type: ignore[misc, valid-type]
        def pipeline(self, checkpoint: str, context: Context) -> Any:
            return None

    headless = Half(tiny_launch.family.options, Context())
    made = engine()
    with pytest.raises(BadInput, match=r"rollout\.engine: this model family has no embedded"):
        asyncio.run(made.start(replace(tiny_launch, family=headless)))
    with pytest.raises(EngineDead, match="is not running"):
        asyncio.run(made.health(1.0))
    asyncio.run(made.stop())


def test_an_update_that_was_not_begun_is_refused(tiny_launch: Launch) -> None:
    made = engine()
    for call in (made.begin_update(1), made.end_update(1)):
        with pytest.raises(EngineDead, match="start it first"):
            asyncio.run(call)
    asyncio.run(made.start(tiny_launch))
    with pytest.raises(EngineError, match="no update in progress; call begin_update first"):
        asyncio.run(made.end_update(1))
    asyncio.run(made.stop())
