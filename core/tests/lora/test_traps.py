"""Traps that tools fall into (lora.md 5): checkpointing, wrappers in names, empty rows, half loads."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from drl.lora import (
    LoraConfig,
    LoraError,
    adapter_off,
    adapter_snapshot,
    adapter_state,
    adapters,
    base_names,
    inject,
    load_adapter_state,
    load_peft,
    merged_state,
    reset_adapters,
    save_peft,
    write_peft,
)

Make = Callable[..., nn.Module]
Inputs = dict[str, torch.Tensor]
CONFIG = LoraConfig(rank=4, alpha=6, target_modules=("to_q", "net.2", "proj_out"))
FULL = LoraConfig(
    rank=4, alpha=6, target_modules=("to_q", "conv_in"), bias="all", modules_to_save=("lora_head",)
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_matrix_gets_a_gradient_under_gradient_checkpointing(
    toy: nn.Module, toy_inputs: Inputs, reentrant: bool
) -> None:
    inject(toy, CONFIG, generator=seeded())
    direct = toy(**toy_inputs).square().sum()
    expected = torch.autograd.grad(direct, [a.B for a in adapters(toy).values()])
    for block in toy.blocks:
        plain = block.forward

        def recomputed(h: torch.Tensor, plain: Callable[..., torch.Tensor] = plain) -> torch.Tensor:
            # reentrant checkpointing trains nothing unless its input requires a gradient
            h = h if h.requires_grad or not reentrant else h.detach().requires_grad_()
            return checkpoint(plain, h, use_reentrant=reentrant)

        block.forward = recomputed
    toy(**toy_inputs).square().sum().backward()
    for gradient, tensors in zip(expected, adapters(toy).values(), strict=True):
        if not reentrant:
            torch.testing.assert_close(tensors.B.grad, gradient)
        assert torch.count_nonzero(tensors.B.grad) > 0


def test_compiled_blocks_keep_plain_names_and_pristine_weights(
    toy: nn.Module,
    make_toy: Make,
    toy_inputs: Inputs,
    train_a_little: Callable[[nn.Module], None],
    tmp_path: Path,
) -> None:
    inject(toy, FULL, generator=seeded())
    train_a_little(toy)
    state = {key: tensor.clone() for key, tensor in adapter_state(toy).items()}
    merged = {name: tensor.clone() for name, tensor in merged_state(toy)}
    expected = toy(**toy_inputs)
    for number, block in enumerate(toy.blocks):
        toy.blocks[number] = torch.compile(block, backend="eager")
    compiled = torch.compile(toy, backend="eager")
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert list(adapter_state(compiled)) == list(state)
    assert list(base_names(compiled).values()) == list(make_toy().state_dict())
    for name, tensor in merged_state(compiled):
        assert torch.equal(tensor, merged[name])
    save_peft(compiled, tmp_path / "a", FULL, base_model=None)
    again = make_toy()
    load_peft(again, tmp_path / "a")
    torch.testing.assert_close(again(**toy_inputs), expected)
    with adapter_off(compiled):
        torch.testing.assert_close(compiled(**toy_inputs), make_toy()(**toy_inputs))


def test_checkpoint_wrappers_inside_the_blocks_keep_plain_names(
    toy: nn.Module, make_toy: Make
) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, block in enumerate(toy.blocks):
        toy.blocks[number] = checkpoint_wrapper(block)
    names = inject(toy, FULL, generator=seeded())
    plain = make_toy()
    assert names == inject(plain, FULL, generator=seeded())
    assert list(adapter_state(toy)) == list(adapter_state(plain))
    assert [name for name, _ in merged_state(toy)] == list(make_toy().state_dict())


def test_all_none_or_partial(toy: nn.Module, make_toy: Make) -> None:
    inject(toy, CONFIG, generator=seeded())
    state = {key: tensor + 1 for key, tensor in adapter_state(toy).items()}
    before = {key: tensor.clone() for key, tensor in adapter_state(toy).items()}
    for at in (1, 5, len(state) - 1):
        partial = dict(list(state.items())[:at])
        with pytest.raises(LoraError, match="only partially there: missing keys"):
            load_adapter_state(toy, partial)
    with pytest.raises(LoraError, match="missing keys") as caught:
        load_adapter_state(toy, {})
    assert "partially" not in str(caught.value)
    assert all(torch.equal(t, before[key]) for key, t in adapter_state(toy).items())


def test_resetting_after_loading_is_the_callers_choice_and_never_half(toy: nn.Module) -> None:
    inject(toy, CONFIG, generator=seeded())
    start = {key: tensor.clone() for key, tensor in adapter_state(toy).items()}
    load_adapter_state(toy, {key: tensor + 1 for key, tensor in start.items()})
    assert all(torch.equal(t, start[key] + 1) for key, t in adapter_state(toy).items())
    reset_adapters(toy, seeded())
    assert all(torch.equal(t, start[key]) for key, t in adapter_state(toy).items())


def test_a_snapshot_is_a_copy_on_the_cpu(toy: nn.Module) -> None:
    inject(toy, FULL, generator=seeded())
    snapshot = adapter_snapshot(toy, FULL)
    before = {key: tensor.clone() for key, tensor in snapshot.tensors.items()}
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter.add_(1)
    assert all(torch.equal(t, before[key]) for key, t in snapshot.tensors.items())
    assert {t.device.type for t in snapshot.tensors.values()} == {"cpu"}
    assert snapshot.targets == ("conv_in", *(f"blocks.{i}.attn.to_q" for i in range(3)))
    assert snapshot.config == FULL


def test_an_adapter_of_another_base_is_refused_with_keys_and_shapes(
    toy: nn.Module, make_toy: Make, tmp_path: Path
) -> None:
    inject(toy, CONFIG, generator=seeded())
    save_peft(toy, tmp_path / "a", CONFIG, base_model="toy")
    for other, word in (
        (
            make_toy(dim=16),
            r"shape mismatch at blocks.0.attn.to_q.lora_A.weight.*\[4, 8\].*\[4, 16\]",
        ),
        (make_toy(blocks=2), "unexpected keys: blocks.2"),
        (make_toy(blocks=4), "missing keys: blocks.3"),
        (nn.ModuleDict({"fc": nn.Linear(8, 8)}), "belongs to another model"),
    ):
        before = str(other)
        with pytest.raises(LoraError, match=word):
            load_peft(other, tmp_path / "a")
        assert str(other) == before


def test_a_file_with_stacked_or_short_matrices_is_refused(toy: nn.Module, tmp_path: Path) -> None:
    inject(toy, CONFIG, generator=seeded())
    save_peft(toy, tmp_path / "a", CONFIG, base_model="toy")
    path = tmp_path / "a" / "adapter_model.safetensors"
    whole = load_file(path)
    key = "base_model.model.proj_out.lora_B.weight"
    for value in (whole[key][None].repeat(3, 1, 1), whole[key].flatten(), whole[key][..., None]):
        save_file({**whole, key: value.contiguous()}, path)
        with pytest.raises(LoraError, match=r"proj_out.lora_B.weight has shape"):
            load_peft(toy, tmp_path / "a")


def in_a_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child and return 0 when it raised that nothing can be written."""
    child = os.fork()
    if child == 0:  # limits and rights must not outlive the test
        code = 1
        try:
            work()
        except LoraError as error:
            code = 0 if "cannot be written" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_directory_that_cannot_be_written(toy: nn.Module) -> None:
    inject(toy, CONFIG, generator=seeded())
    snapshot = adapter_snapshot(toy, CONFIG)
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)

        def work() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write anywhere
            write_peft(snapshot, Path(name) / "a", base_model=None)

        assert in_a_child(work) == 0
        assert os.listdir(name) == []
        os.chmod(name, 0o755)


def test_a_parent_that_is_a_file_cannot_be_written(toy: nn.Module, tmp_path: Path) -> None:
    inject(toy, CONFIG, generator=seeded())
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoraError, match="cannot be written"):
        save_peft(toy, tmp_path / "file" / "a", CONFIG, base_model=None)


def test_a_full_disk_leaves_the_earlier_adapter(toy: nn.Module, tmp_path: Path) -> None:
    inject(toy, CONFIG, generator=seeded())
    snapshot = adapter_snapshot(toy, CONFIG)
    write_peft(snapshot, tmp_path / "a", base_model="old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        write_peft(snapshot, tmp_path / "a", base_model="new")

    assert in_a_child(work) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_wan_sized_list_of_targets_gives_three_hundred_adapters() -> None:
    """The guard of lora.md 8: ten Linears in each of thirty blocks."""

    def attention() -> nn.Module:
        names = ("to_q", "to_k", "to_v")
        out = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.0)])
        return nn.ModuleDict({**{name: nn.Linear(4, 4) for name in names}, "to_out": out})

    def block() -> nn.Module:
        gelu = nn.ModuleDict({"proj": nn.Linear(4, 8)})
        net = nn.ModuleList([gelu, nn.Dropout(0.0), nn.Linear(8, 4)])
        ffn = nn.ModuleDict({"net": net})
        return nn.ModuleDict({"attn1": attention(), "attn2": attention(), "ffn": ffn})

    model = nn.ModuleDict({"blocks": nn.ModuleList([block() for _ in range(30)])})
    targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    config = LoraConfig(rank=1, alpha=0.5, target_modules=targets)
    assert len(inject(model, config, generator=seeded())) == 300


def test_shared_subtrees_and_their_biases_are_refused(toy: nn.Module) -> None:
    toy.again = toy.refiner
    for config in (
        LoraConfig(rank=2, alpha=2, target_modules=("refiner.proj_out",)),
        LoraConfig(
            rank=2, alpha=2, target_modules=("to_q",), modules_to_save=("refiner.proj_out",)
        ),
        LoraConfig(rank=2, alpha=2, target_modules=("to_q",), bias="all"),
    ):
        with pytest.raises(LoraError, match=r"proj_out is one module used in 2 places"):
            inject(toy, config, generator=seeded())
