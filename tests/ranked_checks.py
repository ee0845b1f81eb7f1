"""Checks that every rank of a world runs, in its own process; ``run_checks`` is their common builder."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranked_sockets import collectives_stay_on_the_loopback_interface
from ranked_trainer import (
    WIDTH,
    gradients,
    make_net,
    make_shards,
    make_trainer,
    weights,
    with_nan,
)
from torch import nn
from torch.distributed.tensor import DTensor

from drl.errors import BadInput, ContractError
from drl.lora import LoraError, adapter_off, adapter_state, load_adapter_state, merged_state
from drl.lora.sharding import full_tensor
from drl.model.materialize import ShardSettings, check_filled, spread, tensors_of
from drl.model.parallel import Ranks, reshard, shard, wrapped_modules
from drl.model.trainer import Trainer
from drl.stages.step import Figures, merged
from drl.stages.sync import units
from drl.types import ParityReport

BF16 = ShardSettings(forward_dtype="bf16", reduce_dtype="fp32")


def same_gradients(
    ranks: Ranks, count: int, micro: int, *, lora: bool, shard_frozen: str = "auto"
) -> None:
    """Compare gradients, norm and metrics with those of one rank, within fp32 rounding."""
    alone = make_trainer(lora=lora)
    together = make_trainer(ranks, lora=lora, shard_frozen=shard_frozen)
    (expected,) = alone.train(make_shards(count, 1, micro=micro))
    (report,) = together.train(make_shards(count, ranks.world, micro=micro))
    right = gradients(alone)
    for name, gradient in gradients(together).items():
        size = right[name].abs().max().item()
        torch.testing.assert_close(gradient, right[name], rtol=1e-5, atol=1e-6 * max(size, 1.0))
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert report.skipped is None
    seen = ranks.gather(report)
    assert all(each == seen[0] for each in seen), "reports differ between ranks"


def full_weights_have_the_gradients_of_one_rank(ranks: Ranks) -> None:
    same_gradients(ranks, 8, 2, lora=False)


def adapters_have_the_gradients_of_one_rank(ranks: Ranks) -> None:
    same_gradients(ranks, 8, 2, lora=True)


def a_base_that_stays_whole_gives_the_same_gradients(ranks: Ranks) -> None:
    same_gradients(ranks, 8, 2, lora=True, shard_frozen="never")
    same_gradients(ranks, 7, 3, lora=True, shard_frozen="never")
    net = make_trainer(ranks, lora=True, shard_frozen="never").models["transformer"]
    right = make_net(lora=True).state_dict()
    for name, tensor in net.state_dict().items():
        assert not isinstance(tensor, DTensor), name
        assert torch.equal(tensor, right[name]), name


def a_base_kept_after_the_forward_gives_the_same_gradients(ranks: Ranks) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drl.model.materialize.memory_of", lambda device: 10**12)
        same_gradients(ranks, 7, 3, lora=True, shard_frozen="always")


def uneven_samples_weigh_the_same(ranks: Ranks) -> None:
    for lora in (False, True):
        same_gradients(ranks, 7, 3, lora=lora)
        same_gradients(ranks, 5, 4, lora=lora)


def a_rank_without_samples_changes_nothing(ranks: Ranks) -> None:
    for lora in (False, True):
        same_gradients(ranks, 1, 1, lora=lora)


def steps_stay_together(ranks: Ranks) -> None:
    """Several optimizer steps with clipping: weights stay those of one rank, equal on all ranks."""
    for lora in (False, True):
        alone = make_trainer(lora=lora, clip=0.05)
        together = make_trainer(ranks, lora=lora, clip=0.05)
        expected = list(alone.train(make_shards(8, 1, steps=4)))
        got = list(together.train(make_shards(8, ranks.world, steps=4)))
        assert [r.global_step for r in got] == [0, 1, 2, 3]
        for one, other in zip(got, expected, strict=True):
            assert one.metrics == pytest.approx(other.metrics, rel=1e-4)
        right = weights(alone)
        for name, value in weights(together).items():
            # four steps of AdamW: a step is lr whatever the size of the gradient
            torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-4)


def one_ranks_nan_skips_the_step_on_all(ranks: Ranks) -> None:
    for lora in (False, True):
        trainer = make_trainer(ranks, lora=lora)
        before = weights(trainer)
        (report,) = trainer.train(make_shards(6, ranks.world, change=with_nan))
        last = ranks.world - 1
        assert report.skipped is not None
        assert report.skipped.startswith("non-finite loss in micro-batch ")
        assert report.skipped.endswith(f"on rank {last}")
        assert len(set(ranks.gather(report.skipped))) == 1
        assert trainer.bad_steps == 1
        after = weights(trainer)
        assert all(torch.equal(before[name], value) for name, value in after.items())


def a_broken_gradient_of_one_rank_is_named_on_all(ranks: Ranks) -> None:
    trainer = make_trainer(ranks, lora=True)
    name, parameter = next(iter(trainer.named_parameters()))
    if ranks.rank == ranks.world - 1:
        parameter.register_hook(lambda gradient: gradient * float("inf"))
    (report,) = trainer.train(make_shards(6, ranks.world))
    assert report.skipped == f"non-finite gradient in {name}"


def a_gradient_of_0_moves_nothing_on_any_rank(ranks: Ranks) -> None:
    trainer = make_trainer(ranks, lora=True)
    list(trainer.train(make_shards(6, ranks.world)))
    for _, parameter in trainer.named_parameters():
        parameter.register_hook(torch.zeros_like)
    before = weights(trainer)
    (report,) = trainer.train(make_shards(6, ranks.world))
    assert report.skipped == "the gradient is exactly 0: no group is informative"
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


def steps_that_are_only_measured_have_the_figures_of_one_rank(ranks: Ranks) -> None:
    """No backward pass, on all ranks; sharded weights are let go of, and the next real step works."""
    for lora in (False, True):
        alone, together = make_trainer(lora=lora), make_trainer(ranks, lora=lora)
        (expected,) = alone.train(make_shards(7, 1))
        settings = together.settings
        together.settings = replace(settings, skip="measured")
        before = weights(together)
        (report,) = together.train(make_shards(7, ranks.world))
        assert report.skipped == "measured"
        right = pytest.approx(expected.metrics["train/loss"], rel=1e-5)
        assert report.metrics["train/loss"] == right
        assert all(p.grad is None for _, p in together.named_parameters())
        assert all(torch.equal(before[n], value) for n, value in weights(together).items())
        together.settings, together.global_step = settings, 0
        (real,) = together.train(make_shards(7, ranks.world))
        assert real.metrics == pytest.approx(expected.metrics, rel=1e-5)


def weights_are_spread_as_they_were_read(ranks: Ranks) -> None:
    """Broadcast and reading everywhere give the same bits as one rank has, buffers too."""
    for lora in (False, True):
        right = tensors_of(make_net(lora=lora))
        for load in ("broadcast", "all_ranks"):
            net = make_trainer(ranks, lora=lora, load=load).models["transformer"]
            for name, tensor in tensors_of(net).items():
                assert torch.equal(full_tensor(tensor), right[name]), (load, name)
            check_filled("net", net)


def only_frozen_weights_are_sharded_beside_adapters(ranks: Ranks) -> None:
    net = make_trainer(ranks, lora=True).models["transformer"]
    for name, parameter in net.named_parameters():
        matrix_of_the_base = parameter.ndim >= 2 and not parameter.requires_grad
        assert isinstance(parameter, DTensor) == matrix_of_the_base, name
    rows = net.blocks[0].first.base_layer.weight.to_local().shape[0]
    assert sum(ranks.gather(rows)) == 5


def a_frozen_base_is_stored_as_it_is_gathered(ranks: Ranks) -> None:
    """In bf16 the base is rounded once; adapters stay float32, and no group mixes the two."""
    net = make_net(meta=ranks.rank > 0, lora=True)
    spread("net", net, wrap=("Block",), ranks=ranks, settings=BF16, device="cpu")
    dtypes = {name: p.dtype for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        wanted = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert dtypes[name] == wanted, name
    right = tensors_of(make_net(lora=True))
    for name, tensor in tensors_of(net).items():
        assert torch.equal(full_tensor(tensor), right[name].to(tensor.dtype)), name
    assert net.table.dtype == torch.float32


def the_reference_runs_before_and_after_training(ranks: Ranks) -> None:
    """Adapters off, before the first forward with gradients too: the base alone, and back again."""
    net = make_trainer(ranks, lora=True).models["transformer"]
    base, whole = make_net(), make_net(lora=True)
    x = torch.ones(3, WIDTH)
    with torch.no_grad():
        with adapter_off(net):
            torch.testing.assert_close(net(x), base(x), rtol=0, atol=0)
        torch.testing.assert_close(net(x), whole(x), rtol=0, atol=0)
    trainer = make_trainer(ranks, lora=True, reference=True)
    alone = make_trainer(lora=True, reference=True)
    for _ in range(2):
        (report,) = trainer.train(make_shards(4, ranks.world))
        (expected,) = alone.train(make_shards(4, 1))
        assert report.metrics["train/grad_norm"] == pytest.approx(
            expected.metrics["train/grad_norm"], rel=1e-4
        )


def weights_are_drained_whole_and_in_step(ranks: Ranks) -> None:
    for payload, lora in (("dense", False), ("merged", True), ("lora", True)):
        net = make_trainer(ranks, lora=lora).models["transformer"]
        right = {name: t for unit in units(payload, make_net(lora=lora)) for name, t in unit}
        got = {name: t for unit in units(payload, net) for name, t in unit}
        assert list(got) == list(right)
        for name, tensor in got.items():
            assert not isinstance(tensor, DTensor), name
            assert torch.equal(tensor, right[name]), (payload, name)


def a_forward_without_backward_leaves_the_trained_parameters(ranks: Ranks) -> None:
    trainer = make_trainer(ranks)
    net = trainer.models["transformer"]
    before = [id(parameter) for _, parameter in trainer.named_parameters()]
    with torch.no_grad():
        net(torch.ones(1, WIDTH))
    reshard([net])
    assert [id(parameter) for _, parameter in trainer.named_parameters()] == before


def adapters_load_the_same_on_every_rank(ranks: Ranks) -> None:
    net = make_trainer(ranks, lora=True).models["transformer"]
    state = {name: tensor + 0.5 for name, tensor in adapter_state(net).items()}
    load_adapter_state(net, state)
    assert all(torch.equal(adapter_state(net)[name], value) for name, value in state.items())
    whole = make_net(lora=True)
    load_adapter_state(whole, state)
    expected = dict(merged_state(whole))
    for name, tensor in merged_state(net):
        assert torch.equal(tensor, expected[name]), name
    first = next(iter(state))
    with pytest.raises(LoraError, match=first.replace(".", r"\.")):
        load_adapter_state(net, {name: value for name, value in state.items() if name != first})


def parameters_with_storage_are_refused_where_nothing_is_read(ranks: Ranks) -> None:
    net = make_net(meta=ranks.rank > 0)
    if ranks.rank > 0:
        net.inlet.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        with pytest.raises(ContractError, match=r"1 parameters of rank .* inlet\.weight"):
            spread("net", net, wrap=("Block",), ranks=ranks, settings=BF16, device="cpu")


def another_module_on_one_rank_is_named(ranks: Ranks) -> None:
    net = make_net(meta=ranks.rank > 0)
    if ranks.rank == ranks.world - 1:
        with torch.device("meta"):
            net.inlet = nn.Linear(WIDTH, WIDTH + 1)
    # all ranks exchange their layout first; only the different one raises
    try:
        from drl.model.materialize import adopt_layout

        adopt_layout("net", net, ranks)
        said = ""
    except ContractError as error:
        said = str(error)
    texts = ranks.gather(said)
    assert [bool(text) for text in texts] == [False] * (ranks.world - 1) + [True]
    assert "the first difference is inlet.bias" in texts[-1]


def tied_parameters_and_unknown_classes_are_refused(ranks: Ranks) -> None:
    net = make_net()
    net.blocks[1].first.weight = net.blocks[0].first.weight
    settings = ShardSettings(forward_dtype="fp32", reduce_dtype="fp32", load="all_ranks")
    with pytest.raises(BadInput, match="one tied parameter"):
        spread("net", net, wrap=("Block",), ranks=ranks, settings=settings, device="cpu")
    for wrap, said in (((), "names no classes"), (("Block", "Blok"), "no module of class Blok")):
        with pytest.raises(BadInput, match=said):
            shard(make_net(), wrap=wrap, mesh=ranks.mesh, forward_dtype="fp32")


def inner_groups_come_before_outer_ones(ranks: Ranks) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = nn.Sequential(Outer(), Outer())
    order = wrapped_modules(model, ("Outer", "Linear"))
    for outer in model:
        assert all(order.index(inner) < order.index(outer) for inner in outer.inner)


def figures_of_ranks_add_up(ranks: Ranks) -> None:
    nan = float("nan")
    parts = [
        Figures({"loss": 2.0}, {"loss": 4.0}, {"worst": 1.0}),
        Figures({"loss": 4.0, "rare": 3.0}, {"loss": 2.0, "rare": 1.0}, {"worst": 3.0}),
    ]
    assert merged(parts).reduced("") == {"loss": 1.0, "rare": 3.0, "worst": 3.0}
    broken = merged([*parts, Figures(maxima={"worst": nan}), Figures(maxima={"worst": 9.0})])
    assert broken.maxima["worst"] != broken.maxima["worst"]


def parity_is_that_of_the_worst_rank(ranks: Ranks) -> None:
    from drl.stages.parity import joined

    mine = ParityReport(by_step={0: 0.0, ranks.rank + 1: float(ranks.rank)}, rows=2)
    whole = joined(ranks.gather(mine))
    assert whole.rows == 2 * ranks.world
    assert whole.worst == ranks.world - 1
    assert list(whole.by_step) == list(range(ranks.world + 1))
    broken = joined([mine, ParityReport(by_step={1: float("nan")}, rows=1), mine])
    assert broken.worst != broken.worst


def ranks_tell_each_other(ranks: Ranks) -> None:
    assert ranks.gather(ranks.rank) == list(range(ranks.world))
    assert ranks.broadcast(f"from {ranks.rank}") == "from 0"
    assert ranks.any(ranks.rank == ranks.world - 1)
    assert not ranks.any(False)
    assert {ranks.save_group, ranks.talk, dist.group.WORLD}.__len__() == 3


CHECKS: dict[str, Callable[[Ranks], None]] = {
    check.__name__: check
    for check in (
        full_weights_have_the_gradients_of_one_rank,
        adapters_have_the_gradients_of_one_rank,
        a_base_that_stays_whole_gives_the_same_gradients,
        a_base_kept_after_the_forward_gives_the_same_gradients,
        uneven_samples_weigh_the_same,
        a_rank_without_samples_changes_nothing,
        steps_stay_together,
        one_ranks_nan_skips_the_step_on_all,
        a_broken_gradient_of_one_rank_is_named_on_all,
        a_gradient_of_0_moves_nothing_on_any_rank,
        steps_that_are_only_measured_have_the_figures_of_one_rank,
        weights_are_spread_as_they_were_read,
        only_frozen_weights_are_sharded_beside_adapters,
        a_frozen_base_is_stored_as_it_is_gathered,
        the_reference_runs_before_and_after_training,
        weights_are_drained_whole_and_in_step,
        a_forward_without_backward_leaves_the_trained_parameters,
        adapters_load_the_same_on_every_rank,
        parameters_with_storage_are_refused_where_nothing_is_read,
        another_module_on_one_rank_is_named,
        tied_parameters_and_unknown_classes_are_refused,
        inner_groups_come_before_outer_ones,
        figures_of_ranks_add_up,
        parity_is_that_of_the_worst_rank,
        ranks_tell_each_other,
        collectives_stay_on_the_loopback_interface,
    )
}

OUTCOMES: dict[str, str] = {}
"""What the ranks of the last world said about each check; "" is good."""


def run_checks(ranks: Ranks) -> Trainer:
    """Run every check on every rank, and let rank 0 keep what they said."""
    OUTCOMES.clear()
    for name, check in CHECKS.items():
        text = ""
        try:
            check(ranks)
        except BaseException:
            text = f"rank {ranks.rank}:\n{traceback.format_exc()}"
        OUTCOMES[name] = "".join(ranks.gather(text))
    return make_trainer(ranks)
