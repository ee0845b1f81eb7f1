"""Rules across sections. Each is a generator of problems; one that meets a wrong value says nothing."""

from __future__ import annotations

from drl.config.rules.batch import BATCH_RULES
from drl.config.rules.checkpoint import CHECKPOINT_RULES
from drl.config.rules.cluster import CLUSTER_RULES
from drl.config.rules.data import DATA_RULES
from drl.config.rules.ema import EMA_RULES
from drl.config.rules.lora import LORA_RULES
from drl.config.rules.loss import LOSS_RULES
from drl.config.rules.machine import MACHINE_RULES
from drl.config.rules.optimizer import OPTIMIZER_RULES

RULES = (
    *BATCH_RULES,
    *DATA_RULES,
    *LOSS_RULES,
    *LORA_RULES,
    *OPTIMIZER_RULES,
    *EMA_RULES,
    *CLUSTER_RULES,
    *CHECKPOINT_RULES,
    *MACHINE_RULES,
)

__all__ = ["RULES"]
