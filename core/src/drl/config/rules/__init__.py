"""Rules across sections. Each is a generator of problems; one that meets a wrong value says nothing."""

from __future__ import annotations

from drl.config.rules.advantage import ADVANTAGE_RULES
from drl.config.rules.batch import BATCH_RULES
from drl.config.rules.checkpoint import CHECKPOINT_RULES
from drl.config.rules.cluster import CLUSTER_RULES
from drl.config.rules.data import DATA_RULES
from drl.config.rules.debug import DEBUG_RULES
from drl.config.rules.deterministic import DETERMINISTIC_RULES
from drl.config.rules.device import DEVICE_RULES
from drl.config.rules.ema import EMA_RULES
from drl.config.rules.functions import FUNCTION_RULES
from drl.config.rules.lora import LORA_RULES
from drl.config.rules.loss import LOSS_RULES
from drl.config.rules.machine import MACHINE_RULES
from drl.config.rules.media import MEDIA_RULES
from drl.config.rules.optimizer import OPTIMIZER_RULES
from drl.config.rules.reference import REFERENCE_RULES
from drl.config.rules.rollout import ROLLOUT_RULES
from drl.config.rules.served import SERVED_RULES
from drl.config.rules.training import TRAINING_RULES

RULES = (
    *BATCH_RULES,
    *DATA_RULES,
    *LOSS_RULES,
    *REFERENCE_RULES,
    *ADVANTAGE_RULES,
    *FUNCTION_RULES,
    *LORA_RULES,
    *OPTIMIZER_RULES,
    *EMA_RULES,
    *CLUSTER_RULES,
    *CHECKPOINT_RULES,
    *MACHINE_RULES,
    *ROLLOUT_RULES,
    *SERVED_RULES,
    *MEDIA_RULES,
    *TRAINING_RULES,
    *DEBUG_RULES,
    *DEVICE_RULES,
    *DETERMINISTIC_RULES,
)

__all__ = ["RULES"]
