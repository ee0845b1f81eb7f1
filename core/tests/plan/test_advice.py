"""Changes on a model of round numbers: how they are joined, which are named, which are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_plan import ANATOMY, prediction

from drl.interfaces.outline import Part
from drl.plan.advice import MARGIN, advise, changes, fits, joined, together
from drl.plan.predict import Prediction


def card_of(found: Prediction) -> int:
    """Return a card that this much just fits on."""
    return int(found.largest.room / (1 - MARGIN)) + 1


def settings(found: Prediction) -> list[tuple[str, ...]]:
    return [change[0] for change in changes(found)]


def test_the_phase_that_is_largest_by_then_is_lowered_too() -> None:
    """Smaller micro-batches alone leave the decoding, smaller decodes alone leave the training."""
    found = prediction(
        released=frozenset({"text_encoder"}), rows=32, micro_batches=1, decode_rows=64
    )
    memory = card_of(found.instead(rows=4, micro_batches=8, decode_rows=1))
    *single, both = advise(found, memory)
    assert not any(one.fits for one in single)
    assert both.fits
    assert both.settings == ("model.decode_rows = 1", "train.micro_batch_size = 4")


def test_what_is_needless_in_the_end_is_left_out() -> None:
    found = prediction(own_weights="fp32")
    tight = card_of(prediction(released=frozenset({"text_encoder"})))
    last = advise(found, tight)[-1]
    assert last.settings == ('rollout.weights = "shared"', 'text = "released"')
    for change in joined(found, tight):
        others = [one for one in joined(found, tight) if one != change]
        assert not fits(together(found, others), tight)


def test_where_nothing_fits_only_what_helps_is_joined() -> None:
    found = prediction()
    chosen = joined(found, 100)
    room = together(found, chosen).largest.room
    for change in chosen:
        assert together(found, [one for one in chosen if one != change]).largest.room > room


def test_one_setting_is_no_combination() -> None:
    bare = replace(prediction(rollout=False, rows=1, checkpointed=0.0, adapters=False), rank=None)
    assert [one.settings for one in advise(bare, 100)] == [("model.gradient_checkpointing = true",)]
    assert advise(bare.instead(checkpointed=1.0), 100) == []


def test_parts_that_leave_by_two_settings_add_up() -> None:
    more = Part(name="image_encoder", weight_bytes=3000, release='image = "released"')
    outline = replace(ANATOMY.outline, parts=(*ANATOMY.outline.parts, more))
    anatomy: Any = type(ANATOMY)(**{**vars(ANATOMY), "outline": outline})
    found = replace(prediction(), anatomy=anatomy)
    pair = [change for change in changes(found) if "released" in change[0][0]]
    assert together(found, pair).scenario.released == {"text_encoder", "image_encoder"}


def test_an_engines_rows_are_halved() -> None:
    found = prediction(engine_rows=96, decode_rows=1, rows=1, micro_batches=4)
    assert found.largest.moment == "denoising"
    rows = [text for text, *_ in settings(found) if text.startswith("rollout.rows")]
    assert rows[:2] == ["rollout.rows = 48", "rollout.rows = 24"]
    half = found.instead(engine_rows=48)
    advice = advise(found, card_of(half))
    assert ("rollout.rows = 48",) in [one.settings for one in advice if one.fits]
    assert ("rollout.rows = 24",) not in [one.settings for one in advice]


@pytest.mark.parametrize(
    ("checkpointed", "share", "expected"),
    [
        (0.0, 1.0, [("model.gradient_checkpointing = true",)]),
        (
            0.0,
            0.5,
            [
                ("model.gradient_checkpointing = true",),
                ("model.gradient_checkpointing = true", "model.checkpointed_share = 1.0"),
            ],
        ),
        (0.5, 0.5, [("model.checkpointed_share = 1.0",)]),
        (1.0, 1.0, []),
    ],
)
def test_checkpointing_is_named_by_what_limits_it(
    checkpointed: float, share: float, expected: list[tuple[str, ...]]
) -> None:
    found = prediction(checkpointed=checkpointed, checkpointed_share=share)
    assert [one for one in settings(found) if "checkpoint" in one[0]] == expected
    fields = [changed for one, changed in changes(found) if "checkpoint" in one[0]]
    assert not expected or fields[0]["checkpointed"] == (share if not checkpointed else 1.0)


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ({}, ["cluster.offload = true"]),
        (
            {"offload_given": True},
            ["cluster.offload_train = true", "cluster.offload_rollout = true"],
        ),
        ({"offload_given": True, "offload_train": True}, ["cluster.offload_rollout = true"]),
        ({"cpu_offload": True}, ["cluster.offload_rollout = true"]),
        ({"offload_train": True, "offload_rollout": True}, []),
    ],
)
def test_offload_is_named_by_the_option_that_counts(
    scenario: dict[str, Any], expected: list[str]
) -> None:
    found = settings(prediction(**scenario))
    assert [text for text, *_ in found if "offload" in text] == expected


def test_sharing_is_named_only_where_the_run_can_share() -> None:
    """Of a base that is spread over ranks the engine has a copy, which can be smaller."""
    texts = [
        next(text for text, *_ in settings(prediction(own_weights="fp32", shareable=there)))
        for there in (True, False)
    ]
    assert texts == ['rollout.weights = "shared"', 'rollout.weights = "forward"']
