"""Work of adapters, by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from drl.lora import LoraConfig, active_adapter, adapter_off, inject, merge, use_adapters
from drl.lora.work import adapter_flops

ROWS = {"image": 10, "text": 4, "conv": 6, "words": 5}


class Net(nn.Module):
    """Two streams, a convolution and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(8, 12)
        self.text = nn.Linear(6, 12)
        self.conv = nn.Conv1d(8, 4, kernel_size=2, stride=2)
        self.words = nn.Embedding(50, 6)


def adapted(device: str = "cpu", **settings: object) -> Net:
    with torch.device(device):
        net = Net()
    config = LoraConfig(rank=3, alpha=3, target_modules=tuple(ROWS), **settings)  # type: ignore[arg-type]
    inject(net, config, generator=torch.Generator().manual_seed(0))
    return net


def test_each_layer_counts_its_own_rows() -> None:
    image, text = 10 * 3 * (8 + 12), 4 * 3 * (6 + 12)
    conv = 6 * (3 * 8 * 2 + 4 * 3)
    words = 5 * 3 * 6  # A is looked up
    assert adapter_flops(adapted(), ROWS.__getitem__) == 2 * (image + text + conv + words)


def test_it_is_what_torch_counts_beside_the_base() -> None:
    net = adapted()
    inputs = {"image": torch.randn(10, 8), "text": torch.randn(4, 6), "conv": torch.randn(1, 8, 12)}
    totals = []
    for off in (False, True):
        counter = FlopCounterMode(display=False)
        with counter:
            for name, x in inputs.items():
                if off:
                    with adapter_off(net):
                        net.get_submodule(name)(x)
                else:
                    net.get_submodule(name)(x)
        totals.append(counter.get_total_flops())
    without_words = {**ROWS, "words": 0}
    assert totals[0] - totals[1] == adapter_flops(net, without_words.__getitem__)


def test_ranks_of_a_pattern_count_as_they_are() -> None:
    plain = adapter_flops(adapted(), ROWS.__getitem__)
    other = adapter_flops(adapted(rank_pattern={"text": 1}), ROWS.__getitem__)
    assert plain - other == 2 * 4 * 2 * (6 + 12)


def test_a_module_on_the_meta_device_will_do() -> None:
    assert adapter_flops(adapted("meta"), ROWS.__getitem__) == adapter_flops(
        adapted(), ROWS.__getitem__
    )


def test_only_what_is_computed_counts() -> None:
    net = adapted()
    once = adapter_flops(net, ROWS.__getitem__)
    second = LoraConfig(rank=1, alpha=1, target_modules=("image",))
    inject(net, second, name="second", generator=torch.Generator().manual_seed(0))
    with active_adapter(net, "default", "second"):
        assert adapter_flops(net, ROWS.__getitem__) == once + 2 * 10 * (8 + 12)
    with adapter_off(net):
        assert adapter_flops(net, ROWS.__getitem__) == 0
    use_adapters(net, "default")
    merge(net)
    assert adapter_flops(net, ROWS.__getitem__) == 0
