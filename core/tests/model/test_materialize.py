"""What ranks must agree on before weights are spread, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranked_trainer import LORA, WIDTH, Net, make_net, make_trainer
from safetensors.torch import load_file
from torch import nn

from drl.errors import BadInput, ContractError
from drl.lora import inject
from drl.model.materialize import (
    ShardSettings,
    adopt_layout,
    check_filled,
    check_meta,
    check_untied,
    fill,
    layout_of,
    make_empty,
    tensors_of,
)
from drl.model.parallel import (
    ALONE,
    Ranks,
    frozen_layout,
    gathered_together,
    unsharded_parameters,
    whole_parameters,
    wrapped_modules,
)
from drl.model.precision import store_frozen
from drl.model.weights import write_weights

SECOND = Ranks(rank=1, world=2)


@pytest.mark.parametrize(
    ("load", "rank", "reads"),
    [
        ("broadcast", 0, True),
        ("broadcast", 1, False),
        ("all_ranks", 0, True),
        ("all_ranks", 1, True),
    ],
)
def test_who_reads_the_files(load: str, rank: int, reads: bool) -> None:
    settings = ShardSettings(forward_dtype="bf16", reduce_dtype="fp32", load=load)
    assert settings.reads(Ranks(rank=rank, world=2)) is reads


def test_a_rank_that_reads_nothing_has_nothing_but_shapes() -> None:
    net = make_net(meta=True)
    check_meta("net", net, SECOND)
    net.blocks[1].first.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(
        ContractError, match=r"^net: 1 parameters of rank 1 .*blocks\.1\.first\.bias"
    ):
        check_meta("net", net, SECOND)


def test_adapters_of_a_module_on_the_meta_device_are_there_too() -> None:
    net = make_net(meta=True, lora=True)
    check_meta("net", net, SECOND)
    assert layout_of(net) == layout_of(make_net(lora=True))


def test_ties_are_named_by_both_ends() -> None:
    net = make_net()
    check_untied("net", net)
    net.blocks[1].second.bias = net.blocks[0].second.bias
    with pytest.raises(
        BadInput, match=r"blocks\.0\.second\.bias and blocks\.1\.second\.bias are one"
    ):
        check_untied("net", net)


def test_rank_0_gives_the_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_net()
    first.blocks.to(torch.bfloat16)
    wanted = layout_of(first)
    monkeypatch.setattr(Ranks, "broadcast", lambda self, value: wanted)
    other = make_net(meta=True)
    adopt_layout("net", other, SECOND)
    assert layout_of(other) == wanted
    assert all(tensor.is_meta for tensor in tensors_of(other).values())


@pytest.mark.parametrize("what", ["shape", "missing", "trained"])
def test_another_module_than_rank_0s_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    wanted = layout_of(make_net())
    key = "blocks.0.first.weight"
    if what == "shape":
        wanted[key] = replace(wanted[key], shape=(5, 7))
    elif what == "missing":
        del wanted[key]
    else:
        wanted[key] = replace(wanted[key], trained=False)
    monkeypatch.setattr(Ranks, "broadcast", lambda self, value: wanted)
    with pytest.raises(
        ContractError, match=r"rank 1 built another module .* blocks\.0\.first\.weight: "
    ):
        adopt_layout("net", make_net(meta=True), SECOND)


def test_a_module_made_empty_and_filled_is_the_one_that_was_read() -> None:
    right = tensors_of(make_net(lora=True))
    net = make_net(meta=True, lora=True)
    with pytest.raises(ContractError, match=r"net: \d+ tensors have no values, for example inlet"):
        check_filled("net", net)
    make_empty(net, "cpu", cpu_offload=False)
    fill(net, right, "cpu", alike=True)
    check_filled("net", net)
    for name, tensor in tensors_of(net).items():
        assert torch.equal(tensor, right[name]), name
    assert "table" in right, "a buffer that no state dict has travels too"
    assert "table" not in net.state_dict()


def test_filling_casts_to_what_the_module_stores() -> None:
    right = tensors_of(make_net())
    net = make_net().to(torch.bfloat16)
    fill(net, right, "cpu", alike=True)
    assert torch.equal(net.inlet.weight, right["inlet.weight"].bfloat16())


def test_adapters_stay_whole_trained_or_not() -> None:
    net = make_net()
    assert whole_parameters(net) == []
    inject(net, LORA, generator=torch.Generator().manual_seed(0))
    whole = whole_parameters(net)
    assert len(whole) == 2 * 2 * 2  # blocks, layers, matrices
    net.requires_grad_(False)
    assert whole_parameters(net) == whole
    store_frozen(net, "bf16")
    assert {p.dtype for p in whole} == {torch.float32}
    assert net.inlet.weight.dtype == torch.bfloat16


def test_vectors_of_the_base_stay_whole_beside_adapters_only() -> None:
    assert unsharded_parameters(make_net()) == []
    net = make_net(lora=True)
    left = {id(p) for p in unsharded_parameters(net)}
    for name, parameter in net.named_parameters():
        assert (id(parameter) in left) == ("lora_" in name or parameter.ndim < 2), name


@pytest.mark.parametrize(
    ("wanted", "memory", "layout"),
    [
        ("always", 10**12, "kept"),
        ("always", 1, "sharded"),
        ("always", None, "sharded"),
        ("never", 1, "whole"),
        ("never", None, "whole"),
        ("auto", None, "sharded"),
        ("auto", 10**12, "whole"),
    ],
)
def test_a_base_is_sharded_when_asked_or_when_it_is_too_large(
    wanted: str, memory: int | None, layout: str
) -> None:
    net = make_net(lora=True)
    assert frozen_layout(net, wanted=wanted, forward_dtype="bf16", memory=memory) == layout


def test_a_quarter_of_the_memory_in_the_forwards_precision_is_the_limit() -> None:
    net = make_net(lora=True)
    base = sum(p.numel() for name, p in net.named_parameters() if "lora_" not in name)
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        enough = 4 * base * size
        for memory, layout in ((enough, "whole"), (enough - 4, "sharded")):
            found = frozen_layout(net, wanted="auto", forward_dtype=dtype, memory=memory)
            assert found == layout
        assert frozen_layout(net, wanted="always", forward_dtype=dtype, memory=enough) == "kept"


def test_trained_weights_are_always_sharded() -> None:
    for wanted in ("auto", "always", "never"):
        layout = frozen_layout(make_net(), wanted=wanted, forward_dtype="bf16", memory=10**12)
        assert layout == "sharded"


def test_classes_to_shard_by_are_found_below_adapters() -> None:
    net = make_net(lora=True)
    assert wrapped_modules(net, ("Block",)) == [net.blocks[1], net.blocks[0]]
    assert wrapped_modules(net, ["ModuleList"]) == [net.blocks]
    with pytest.raises(BadInput, match=r"Net has no module of class Net, .* it has Block, "):
        wrapped_modules(net, ("Net",))


def test_neighbours_are_gathered_together_up_to_a_limit() -> None:
    net = torch.nn.ModuleDict(
        {
            "first": torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(5)),
            "second": torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2)),
        }
    )
    first, second = net["first"], net["second"]
    order = wrapped_modules(net, ("Linear",))
    size = 4 * 4 * 4

    def groups(limit: int) -> list[list[torch.nn.Module]]:
        return gathered_together(net, order, limit)

    # inner and later ones first; inside a group in the order of the forward
    assert groups(2 * size) == [
        [second[0], second[1]],
        [first[3], first[4]],
        [first[1], first[2]],
        [first[0]],
    ]
    assert groups(100 * size) == [list(second), list(first)]  # never over a parent's end
    # a module larger than the limit has a group of its own
    assert groups(1) == [[one] for one in order]


def test_modules_of_another_class_do_not_join() -> None:
    mixed = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Conv1d(2, 2, 1), torch.nn.Linear(2, 2)
    )
    order = wrapped_modules(mixed, ("Linear", "Conv1d"))
    assert gathered_together(mixed, order, 10**6) == [[mixed[2]], [mixed[1]], [mixed[0]]]


def test_weights_are_written_by_plain_names_and_adapters_left_out(tmp_path) -> None:
    models = {"first": make_net(), "second": make_net(lora=True)}
    (file,) = write_weights(models, tmp_path / "model", ALONE)
    assert file == tmp_path / "model" / "first.safetensors"
    stored = load_file(file)
    state = models["first"].state_dict()
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    # a rank above 0 takes part in gathering and writes nothing
    (same,) = write_weights({"first": make_net()}, tmp_path / "other", SECOND)
    assert same == tmp_path / "other" / "first.safetensors"
    assert not same.parent.exists()


def test_the_net_of_these_tests_is_what_it_says() -> None:
    trainer = make_trainer()
    assert isinstance(trainer.models["transformer"], Net)
    assert sum(p.numel() for _, p in trainer.named_parameters()) == WIDTH * 7 + 2 * (35 + 36)
