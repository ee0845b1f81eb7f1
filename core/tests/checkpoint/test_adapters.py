"""The adapter beside the checkpoints: read back by its users' rules before it counts as written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from drl.checkpoint.adapters import check_adapter, write_adapters
from drl.errors import CheckpointError
from drl.lora import LoraConfig, LoraError, adapter_snapshot, inject, read_peft
from drl.lora.peft_directory import DIFFUSERS_FILE
from drl.lora.peft_tensors import WEIGHTS_FILE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(6, 4)
        self.to_v = nn.Linear(6, 4)


@pytest.fixture
def snapshot():
    config = LoraConfig(rank=2, alpha=6, target_modules=("to_q", "to_v"))
    model = Block()
    inject(model, config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape))
    return adapter_snapshot(model, config)


def test_one_component_has_the_root_and_several_a_folder_each(tmp_path, snapshot):
    written = write_adapters({"transformer": snapshot}, tmp_path / "one", base_model="org/m")
    assert written == [tmp_path / "one"]
    both = {"transformer": snapshot, "transformer_2": snapshot}
    written = write_adapters(both, tmp_path / "two", base_model="org/m")
    assert written == [tmp_path / "two" / "transformer", tmp_path / "two" / "transformer_2"]
    for folder in (tmp_path / "one", *written):
        config, state = read_peft(folder)
        assert (config.rank, config.alpha) == (2, 6)
        assert all(torch.equal(state[k], snapshot.tensors[k]) for k in snapshot.tensors)


def test_no_adapters_write_nothing(tmp_path):
    assert write_adapters({}, tmp_path / "adapter", base_model="org/m") == []
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_is_replaced_by_the_next(tmp_path, snapshot):
    for _ in range(2):
        write_adapters({"transformer": snapshot}, tmp_path / "a", base_model="org/m")
    check_adapter(tmp_path / "a", snapshot, "transformer")


def test_what_lies_there_and_is_no_adapter_stays(tmp_path, snapshot):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.txt").write_text("mine")
    with pytest.raises(LoraError, match=r"mine\.txt"):
        write_adapters({"transformer": snapshot}, tmp_path / "a", base_model="org/m")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine.txt"]


def rewrite(file, change, metadata=None):
    """Write a safetensors file again after a change to its tensors or its header."""
    with safe_open(file, framework="pt") as stream:
        header = dict(stream.metadata())
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=header if metadata is None else metadata(header))


@pytest.mark.parametrize("file", [WEIGHTS_FILE, DIFFUSERS_FILE])
@pytest.mark.parametrize("harm", ["value", "dtype", "missing", "extra"])
def test_a_tensor_that_is_not_the_trained_one_is_named(tmp_path, snapshot, file, harm):
    write_adapters({"transformer": snapshot}, tmp_path / "a", base_model="org/m")

    def change(tensors):
        name = next(key for key in tensors if key.endswith("to_q.lora_B.weight"))
        if harm == "value":
            tensors[name][0, 0] += 1e-6
        elif harm == "dtype":
            tensors[name] = tensors[name].double()
        elif harm == "missing":
            del tensors[name]
        else:
            tensors["other"] = torch.ones(1)

    rewrite(tmp_path / "a" / file, change)
    with pytest.raises((CheckpointError, LoraError), match=r"to_q\.lora_B\.weight|other"):
        check_adapter(tmp_path / "a", snapshot, "transformer")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"lora_alpha": 2}, "'lora_alpha': 2"), ({"r": 4}, "'r': 4"), (None, "lora_adapter_metadata")],
)
def test_a_header_of_another_strength_is_an_error(tmp_path, snapshot, fields, words):
    write_adapters({"transformer": snapshot}, tmp_path / "a", base_model="org/m")

    def metadata(header):
        if fields is None:
            return {"format": "pt"}
        described = json.loads(header["lora_adapter_metadata"])
        described |= {f"transformer.{key}": value for key, value in fields.items()}
        return header | {"lora_adapter_metadata": json.dumps(described)}

    rewrite(tmp_path / "a" / DIFFUSERS_FILE, lambda tensors: None, metadata)
    with pytest.raises(CheckpointError, match="would not load as trained") as caught:
        check_adapter(tmp_path / "a", snapshot, "transformer")
    assert words in str(caught.value)


def test_the_header_belongs_to_the_component(tmp_path, snapshot):
    write_adapters({"transformer": snapshot}, tmp_path / "a", base_model="org/m")
    with pytest.raises(CheckpointError, match=r"transformer\.to_q.* is not part of it"):
        check_adapter(tmp_path / "a", snapshot, "transformer_2")


def test_a_cut_file_is_named(tmp_path, snapshot):
    write_adapters({"transformer": snapshot}, tmp_path / "a", base_model="org/m")
    file = tmp_path / "a" / DIFFUSERS_FILE
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="it cannot be read"):
        check_adapter(tmp_path / "a", snapshot, "transformer")
