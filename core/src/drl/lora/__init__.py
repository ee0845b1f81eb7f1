"""LoRA adapters of drl: inject, train, merge, save and load.

Typical use::

    config = LoraConfig(rank=16, alpha=32, target_modules=("to_q", "to_v"))
    inject(transformer, config, generator=torch.Generator().manual_seed(0))
    with adapter_off(transformer):
        reference = transformer(...)
    save_peft(transformer, "adapter", config, base_model="org/model")
"""

from __future__ import annotations

from drl.lora.config import LoraConfig
from drl.lora.errors import AdapterNotFound, LoraError
from drl.lora.inject import (
    inject,
    remove_adapter,
    reset_adapters,
    seed_saved_modules,
    train_adapter,
)
from drl.lora.layer import LoraConv, LoraEmbedding, LoraLayer, LoraLinear
from drl.lora.merge import merge, merge_delta, merged_state, unmerge
from drl.lora.naming import to_plain_name, to_pushed_name
from drl.lora.peft_directory import inject_peft, load_peft, read_peft, save_peft, write_peft
from drl.lora.snapshot import AdapterSnapshot, adapter_snapshot, snapshot_of
from drl.lora.state import (
    AdapterTensors,
    adapter_state,
    adapters,
    load_adapter_state,
    uniform_adapters,
    uniform_rank_alpha,
)
from drl.lora.switching import active_adapter, adapter_off, use_adapters
from drl.lora.tree import adapter_names, base_names, lora_layers

__all__ = [
    "AdapterNotFound",
    "AdapterSnapshot",
    "AdapterTensors",
    "LoraConfig",
    "LoraConv",
    "LoraEmbedding",
    "LoraError",
    "LoraLayer",
    "LoraLinear",
    "active_adapter",
    "adapter_names",
    "adapter_off",
    "adapter_snapshot",
    "adapter_state",
    "adapters",
    "base_names",
    "inject",
    "inject_peft",
    "load_adapter_state",
    "load_peft",
    "lora_layers",
    "merge",
    "merge_delta",
    "merged_state",
    "read_peft",
    "remove_adapter",
    "reset_adapters",
    "save_peft",
    "seed_saved_modules",
    "snapshot_of",
    "to_plain_name",
    "to_pushed_name",
    "train_adapter",
    "uniform_adapters",
    "uniform_rank_alpha",
    "unmerge",
    "use_adapters",
    "write_peft",
]
