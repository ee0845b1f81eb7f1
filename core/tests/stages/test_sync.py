"""Units, proof and alarm of a weight push."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drl.errors import SyncError
from drl.interfaces.engine import WeightProof
from drl.interfaces.updater import PushReport
from drl.lora import LoraConfig, adapters, inject
from drl.stages.sync import (
    SyncLog,
    check_changed,
    check_proof,
    lora_fields,
    proof_level,
    unit_bytes,
    units,
)


def model(*, wrapped=True):
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("to_q", nn.Linear(4, 4))
    net.add_module("to_k", nn.Linear(4, 4, bias=False))
    if wrapped:
        config = LoraConfig(rank=2, alpha=4, target_modules=("to_q", "to_k"))
        inject(net, config, generator=torch.Generator().manual_seed(0))
    return net


def report(**changes):
    values = {
        "version": 3,
        "component": "transformer",
        "names": ("a", "b"),
        "buckets": 1,
        "bytes": 8,
        "checksum": "c0ffee" * 8,
    }
    return PushReport(**(values | changes))


def proof(**changes):
    values = {
        "version": 3,
        "checksums": {"transformer": "c0ffee" * 8},
        "counts": {"transformer": 2},
        "model_checksums": {"transformer": "m1"},
    }
    return WeightProof(**(values | changes))


def test_adapter_pairs_travel_together_under_pushed_names():
    sent = list(units("lora", model()))
    assert [[name for name, _ in unit] for unit in sent] == [
        ["to_q.lora_A", "to_q.lora_B"],
        ["to_k.lora_A", "to_k.lora_B"],
    ]
    assert unit_bytes(sent[0]) == 2 * 4 * 2 * 4


def test_dense_and_merged_units_have_plain_names():
    plain = [name for unit in units("dense", model(wrapped=False)) for name, _ in unit]
    merged = [name for unit in units("merged", model()) for name, _ in unit]
    assert sorted(plain) == sorted(merged) == ["to_k.weight", "to_q.bias", "to_q.weight"]


def test_rank_and_alpha_come_from_the_adapter_itself():
    fields = lora_fields(model())
    assert (fields.rank, fields.alpha) == (2, 4)


def test_uneven_adapters_are_refused_with_the_way_out():
    net = model(wrapped=False)
    config = LoraConfig(rank=2, alpha=4, target_modules=("to_q", "to_k"), rank_pattern={"to_q": 1})
    inject(net, config, generator=torch.Generator().manual_seed(0))
    assert {a.rank for a in adapters(net).values()} == {1, 2}
    with pytest.raises(SyncError, match="in_process_merged"):
        lora_fields(net)


@pytest.mark.parametrize(
    ("wanted", "offered", "level"),
    [
        ("auto", ["checksum"], "checksum"),
        ("auto", ["checksum", "counts"], "counts"),
        ("names", ["checksum"], "names"),
        ("off", ["checksum"], "off"),
    ],
)
def test_the_proof_is_as_strong_as_the_weakest_engine(wanted, offered, level):
    assert proof_level(wanted, offered) == level


def test_a_proof_that_no_engine_can_give_is_refused():
    with pytest.raises(SyncError, match="only prove 'counts'"):
        proof_level("checksum", ["counts"])


def test_a_good_push_passes_every_level():
    for level in ("off", "counts", "names", "checksum"):
        check_proof([report()], proof(), 3, level)


@pytest.mark.parametrize(
    ("sent", "held", "message"),
    [
        (report(unexpected=("x.to_q",)), proof(), r"unknown to the engine \(1\): \['x.to_q'\]"),
        (report(missing=("to_v",)), proof(), r"not sent \(1\): \['to_v'\]"),
        (report(), proof(counts={"transformer": 1}), "sent 2 tensors, the engine wrote 1"),
        (report(), proof(counts={}), "wrote None"),
        (report(), proof(version=2), "answers with 2"),
        (report(), proof(checksums={"transformer": "bad"}), "damaged"),
    ],
)
def test_what_did_not_arrive_is_named(sent, held, message):
    with pytest.raises(SyncError, match=message):
        check_proof([sent], held, 3, "checksum")


def test_new_weights_that_change_nothing_raise_the_alarm():
    log = SyncLog()
    check_changed(log, [report()], proof())
    with pytest.raises(SyncError, match="did not change"):
        check_changed(log, [report(checksum="other")], proof())


def test_the_same_weights_again_are_no_alarm():
    log = SyncLog()
    for _ in range(2):
        check_changed(log, [report()], proof())
    check_changed(log, [report(checksum="other")], proof(model_checksums={"transformer": "m2"}))


def test_a_change_that_the_engine_says_was_lost_in_rounding_is_no_alarm():
    log = SyncLog()
    check_changed(log, [report()], proof())
    check_changed(log, [report(checksum="near")], proof(unchanged=frozenset({"transformer"})))
    with pytest.raises(SyncError, match="did not change"):
        check_changed(log, [report(checksum="other")], proof(unchanged=frozenset({"another"})))
