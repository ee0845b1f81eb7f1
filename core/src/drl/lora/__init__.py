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
from drl.lora.inject import adapter_off, inject, lora_layers, reset_adapters
from drl.lora.layer import LoraLinear
from drl.lora.merge import merge_delta, merged_state
from drl.lora.naming import to_plain_name, to_pushed_name
from drl.lora.peft_directory import load_peft, read_peft, save_peft
from drl.lora.state import AdapterTensors, adapter_state, adapters, load_adapter_state

__all__ = [
    "AdapterNotFound",
    "AdapterTensors",
    "LoraConfig",
    "LoraError",
    "LoraLinear",
    "adapter_off",
    "adapter_state",
    "adapters",
    "inject",
    "load_adapter_state",
    "load_peft",
    "lora_layers",
    "merge_delta",
    "merged_state",
    "read_peft",
    "reset_adapters",
    "save_peft",
    "to_plain_name",
    "to_pushed_name",
]
