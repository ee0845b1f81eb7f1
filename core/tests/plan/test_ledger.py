"""Memory and work on the meta device, against numbers by hand and against what torch itself counts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from drl.plan.ledger import (
    Ledger,
    attention_flops,
    checkpointed,
    inference_footprint,
    observed,
    training_footprint,
)

ROWS, WIDTH = 64, 128
ROW_BYTES = ROWS * WIDTH * 4


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def test_live_bytes_follow_tensors_to_their_end() -> None:
    with Ledger() as ledger:
        first = meta(ROWS, WIDTH)
        second = first + 1
        assert ledger.live == 2 * ROW_BYTES
        view = second[1:]
        assert ledger.live == 2 * ROW_BYTES  # the same storage
        del second
        assert ledger.live == 2 * ROW_BYTES
        del view, first
        gc.collect()
        assert ledger.live == 0
        assert ledger.peak == 2 * ROW_BYTES


def test_what_was_there_before_counts_nothing() -> None:
    weight = meta(WIDTH, WIDTH)
    with Ledger() as ledger:
        weight.add_(1)
        weight.view(-1)
        assert (ledger.live, ledger.peak) == (0, 0)


def test_sizes_are_rounded_as_an_allocator_does() -> None:
    with Ledger() as ledger:
        kept = meta(1)
        assert ledger.live == 512
        del kept


def test_a_linear_layer_without_gradient() -> None:
    layer, x = nn.Linear(WIDTH, 2 * WIDTH, device="meta"), meta(ROWS, WIDTH)
    found = inference_footprint(lambda: layer(x), torch.float32)
    assert found.forward_flops == 2 * ROWS * WIDTH * 2 * WIDTH
    assert found.peak == 2 * ROW_BYTES
    assert found.kept == found.backward_flops == 0


@pytest.mark.parametrize(
    ("order", "reordered", "images"),
    [
        (torch.contiguous_format, False, 2),  # the output, and what follows
        (torch.contiguous_format, True, 3),  # beside the output a copy of it, and one of the input
        (torch.channels_last, True, 2),  # nothing to reorder
    ],
)
def test_a_convolution_holds_copies_with_the_channels_last(
    order: torch.memory_format, reordered: bool, images: int
) -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1, device="meta")
    x = meta(2, 8, 16, 16).to(memory_format=order)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made.append(layer(x))
        made.append(made[0] + 1)

    found = inference_footprint(forward, torch.float32, reordered=reordered)
    assert found.peak == images * x.nbytes
    assert all(one.is_contiguous(memory_format=order) for one in made)


def test_training_keeps_what_the_backward_needs() -> None:
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(3)])
    layers[0].requires_grad_(False)
    x = meta(ROWS, WIDTH)
    found = training_footprint(lambda: [layers(x)], torch.float32)
    one = 2 * ROWS * WIDTH * WIDTH
    assert found.forward_flops == 3 * one
    # gradients of two weights, and of the input of the last alone: nothing before is trained
    assert found.backward_flops == 3 * one
    # inputs of both trained layers, and the output
    assert found.kept == 3 * ROW_BYTES
    assert found.peak >= found.kept + ROW_BYTES


@pytest.mark.parametrize("trained", [False, True])
def test_work_is_what_torch_counts_on_real_tensors(trained: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(2), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 5)
    )
    net[2].requires_grad_(trained)
    x = torch.randn(2, 3, 4, 4)
    with FlopCounterMode(display=False) as real:
        net(x).sum().backward()
    blank = net.to("meta")
    found = training_footprint(lambda: [blank(x.to("meta"))], torch.float32)
    assert found.forward_flops + found.backward_flops == real.get_total_flops()


def test_attention_costs_its_products_and_keeps_no_weights() -> None:
    query, key = meta(2, 3, 10, 8), meta(2, 3, 20, 8)
    query.requires_grad_()

    def attend() -> list[torch.Tensor]:
        return [functional.scaled_dot_product_attention(query, key, key)]

    found = training_footprint(attend, torch.float32)
    forward = 2 * (2 * 3 * 10) * 20 * (8 + 8)
    assert attention_flops(query, key, key) == forward
    assert (found.forward_flops, found.backward_flops) == (forward, 2 * forward)
    # output and one number per query, each in whole allocations; no table of 10 x 20
    assert found.kept == 2048 + 512


def test_matrix_products_run_in_the_low_precision_and_norms_in_float32() -> None:
    layer, norm = nn.Linear(WIDTH, WIDTH, device="meta"), nn.LayerNorm(WIDTH, device="meta")
    x = meta(ROWS, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad(), observed(torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
        assert norm(x).dtype == torch.float32
        assert (x @ x.T).dtype == torch.bfloat16
        assert functional.gelu(x).dtype == torch.bfloat16
    with torch.no_grad(), observed(torch.float32):
        assert layer(x.float()).dtype == torch.float32


def test_the_same_dtypes_as_autocast_on_real_tensors() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    dtypes: list[torch.dtype] = []
    for module in net:
        module.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    real = list(dtypes)
    dtypes.clear()
    inference_footprint(lambda: net.to("meta")(x.to("meta")), torch.bfloat16)
    assert dtypes == real == [torch.bfloat16] * 3


class Block(nn.Module):
    """A block with much inside and little at its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH, device="meta")
        self.down = nn.Linear(8 * WIDTH, WIDTH, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(functional.layer_norm(x, (WIDTH,)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_keep_their_inputs_and_cost_a_second_forward(dtype: torch.dtype) -> None:
    blocks = [Block() for _ in range(4)]
    x = meta(ROWS, WIDTH)

    def run(repeat: bool) -> list[torch.Tensor]:
        h = x
        for block in blocks:
            h = checkpointed(block, h) if repeat else block(h)
        return [h]

    plain = training_footprint(lambda: run(False), dtype)
    again = training_footprint(lambda: run(True), dtype)
    assert again.forward_flops == plain.forward_flops
    one = plain.forward_flops / 4
    # a block's last product is not needed again: recomputation may end before it
    assert plain.backward_flops + 4 * one / 2 <= again.backward_flops
    assert again.backward_flops <= plain.backward_flops + 4 * one
    assert again.kept < plain.kept / 4
    assert again.peak < plain.peak
