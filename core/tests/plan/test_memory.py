"""Bytes by phase, followed by hand on a model of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plan import ANATOMY, BYTES, OUTLINE, SCENARIO

from drl.plan.memory import COMPILED_SHARE, EXACT, Measured, phases_of

PARTS = 5700
STATE = 2 * 40


def phases(measured=EXACT, **changes):
    return {one.name: one for one in phases_of(ANATOMY, replace(SCENARIO, **changes), measured)}


def test_an_iteration_with_shared_weights() -> None:
    found = phases()
    # frozen 2000, buffers 30, adapters 40; merged copies of 100 weights in bf16; encoders and VAE
    weights = 2070 + 200 + PARTS
    data = 16 * 6 * 40 + 3 * 48
    rollout = found["rollout"]
    assert (rollout.moment, rollout.weights, rollout.state) == ("decoding", weights, STATE)
    assert (rollout.data, rollout.activations) == (data, 400)
    train = found["train"]
    assert (train.weights, train.state) == (weights, STATE + 40)
    assert train.data == data + 2 * 4 * 8 * 40
    assert train.activations == 8 * 100
    push = found["update_weights"]
    # what is merged is more here than what comparing the model takes, 150; 40: copies of the adapters
    assert (push.weights, push.activations, push.data) == (weights, 40 + 200, data)
    assert push.peak == weights + STATE + 40 + data + 40 + 200


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"own_weights": "shared"}, 200),
        ({"own_weights": "shared", "applied": True}, 10 * 2),
        ({"own_weights": "fp32"}, 4000 + 30 + 400),
        ({"own_weights": "forward"}, 2000 + 30 + 200),
        ({"own_weights": "fp32", "applied": True}, 4000 + 30 + 10 * 2),
        ({"own_weights": "fp32", "applied": True, "forward_size": 4}, 4000 + 30 + 10 * 4),
        ({"own_weights": "fp32", "adapters": False}, 4000 + 30),
        ({"own_weights": "fp32", "forward_size": 4}, 4000 + 30 + 400),
    ],
)
def test_what_the_engine_holds(changes, own) -> None:
    assert phases(**changes)["train"].weights == 2070 + own + PARTS


def test_batched_guidance_doubles_the_rows_of_a_forward_but_two_forwards_do_not() -> None:
    small = {"decode_rows": 1}
    assert phases(**small)["rollout"].activations == 8 * 20
    assert phases(branches=2, batched=True, **small)["rollout"].activations == 16 * 20
    assert phases(branches=2, batched=False, **small)["rollout"].activations == 8 * 20


def test_training_with_guidance_keeps_both_predictions() -> None:
    assert phases(trained_branches=2)["train"].activations == 16 * 100
    assert phases(rows_per_pair=2)["train"].activations == 16 * 100


def test_a_pass_without_gradient_comes_on_top_of_what_is_kept() -> None:
    found = phases(extra_passes=1)
    assert found["train"].activations == 8 * 100 + 8 * 20
    # recomputed: only 10 a row are kept by then, and the backward's 30 are more than 10 + 20 or as much
    assert phases(extra_passes=1, checkpointed=1.0)["train"].activations == 8 * 30


def test_compiled_blocks_keep_a_share_of_what_is_inside_them() -> None:
    compiled = Measured(trained_share=0.5)
    assert phases(compiled)["train"].activations == 8 * 50
    # of blocks that are recomputed the inputs stay whole: 10 + half of the other 20
    assert phases(compiled, checkpointed=1.0)["train"].activations == 8 * (10 + 10)
    assert phases(compiled, checkpointed=0.5)["train"].activations == 8 * (5 + 25)


def test_a_push_without_merges_still_compares_the_model() -> None:
    assert phases(applied=True)["update_weights"].activations == BYTES.trained + BYTES.compared
    assert phases(adapters=False)["update_weights"].activations == BYTES.compared


def test_workspace_is_added_to_every_phase() -> None:
    plain, more = phases(), phases(Measured(workspace=7))
    for name, phase in more.items():
        assert phase.peak == plain[name].peak + 7


def test_recorded_forwards_keep_their_memory_and_copies_of_inputs_beside_every_phase() -> None:
    plain, graphs = phases(), phases(graphs=True)
    copies = 8 * (48 + 40)
    for name, phase in graphs.items():
        assert (phase.peak, phase.graphs) == (plain[name].peak + copies, 8 * 30)
        assert phase.room == phase.peak + phase.graphs
        assert plain[name].room == plain[name].peak
    both = phases(graphs=True, branches=2, batched=True)
    assert both["train"].graphs == 16 * 30
    assert both["train"].data == plain["train"].data + 8 * (2 * 48 + 40)
    applied = phases(graphs=True, applied=True)
    assert applied["train"].graphs == 8 * 35
    compiled = phases(graphs=True, engine_compiled=True)
    assert compiled["train"].graphs == int(COMPILED_SHARE * 8 * 30)


def test_a_forward_computes_in_the_memory_of_its_graph() -> None:
    """Its own activations are not needed twice."""
    decoding = phases(graphs=True, decode_rows=1, branches=2, batched=True)["rollout"]
    assert (decoding.moment, decoding.activations, decoding.graphs) == ("decoding", 100, 480)
    denoising = phases(graphs=True, decode_rows=0)["rollout"]
    assert (denoising.activations, denoising.graphs) == (8 * 20, 8 * 10)


def test_graphs_are_forgotten_by_an_engine_that_leaves() -> None:
    away = phases(graphs=True, offload_rollout=True)
    assert away["rollout"].graphs == 8 * 30
    assert (away["train"].graphs, away["update_weights"].graphs) == (0, 0)
    assert away["train"].data == phases(offload_rollout=True)["train"].data
    assert phases(graphs=True, rollout=False)["train"].graphs == 0


def test_parts_that_are_released_take_nothing() -> None:
    less = phases(released=frozenset({"text_encoder"}))
    assert less["train"].weights == phases()["train"].weights - 5000


def test_smaller_decodes_take_less() -> None:
    assert phases(decode_rows=2)["rollout"].activations == max(200, 8 * 20)
    assert OUTLINE.decode_rows == 4


def test_an_engine_that_is_offloaded_is_away_while_the_trainer_trains() -> None:
    away = phases(offload_rollout=True, own_weights="fp32")
    assert away["train"].weights == 2070
    assert away["rollout"].weights == away["update_weights"].weights + PARTS
    assert away["update_weights"].weights == 2070 + 4430


def test_a_trainer_that_is_offloaded_leaves_what_the_engine_computes_with() -> None:
    shared = phases(offload_train=True)["rollout"]
    assert (shared.weights, shared.state) == (2000 + 200 + PARTS, 0)
    own = phases(offload_train=True, own_weights="fp32")["rollout"]
    assert (own.weights, own.state) == (4430 + PARTS, 0)


def test_averages_are_float32_copies_of_what_is_trained() -> None:
    assert phases(copies=1)["train"].state == STATE + 40 + 4 * 10
    assert phases(optimizer_states=0)["train"].state == 40


def test_full_weights_are_spread_over_ranks() -> None:
    one, four = phases(adapters=False), phases(adapters=False, shards=4)
    assert one["train"].weights - 30 - PARTS == 4 * (four["train"].weights - 30 - PARTS)
    assert one["train"].state == 4 * four["train"].state


def test_half_the_rank_halves_what_is_trained() -> None:
    half = phases(rank_factor=0.5)["train"]
    assert half.state == (STATE + 40) / 2
    assert half.weights == phases()["train"].weights - BYTES.trained // 2


def test_a_run_without_an_engine_has_no_rollout_and_no_parts() -> None:
    found = phases(rollout=False)
    assert list(found) == ["train"]
    assert found["train"].weights == 2070


def test_weights_on_the_cpu_leave_buffers_alone() -> None:
    full = {"adapters": False, "own_weights": "fp32", "shards": 2}
    there, away = phases(**full)["train"], phases(**full, cpu_offload=True)["train"]
    assert away.state == 0 < there.state
    trainer = (BYTES.frozen + BYTES.trained) // 2
    assert there.weights - away.weights == trainer
