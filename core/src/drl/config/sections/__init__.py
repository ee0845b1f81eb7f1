"""The sections of a recipe that core owns, in the order in which they are shown."""

from __future__ import annotations

from drl.config.fields import Section
from drl.config.sections.algorithm import (
    AlgorithmSection,
    CheckpointSection,
    LoggingSection,
    RewardSection,
    RewardTerm,
    SyncSection,
    TrustSection,
)
from drl.config.sections.debug import CiOptions, DebugSection
from drl.config.sections.model import ClusterSection, LoraSection, ModelSection, RunSection
from drl.config.sections.rollout import (
    DataSection,
    EvalDataset,
    EvalSection,
    RolloutSection,
    SamplingSection,
    SdeSection,
)
from drl.config.sections.train import EmaSection, OptimizerSection, TrainSection

SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "lora": LoraSection,
    "cluster": ClusterSection,
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "ema": EmaSection,
    "rollout": RolloutSection,
    "sampling": SamplingSection,
    "sde": SdeSection,
    "data": DataSection,
    "eval": EvalSection,
    "algorithm": AlgorithmSection,
    "reward": RewardSection,
    "checkpoint": CheckpointSection,
    "logging": LoggingSection,
    "sync": SyncSection,
    "trust": TrustSection,
    "debug": DebugSection,
}

__all__ = [
    "SECTIONS",
    "AlgorithmSection",
    "CheckpointSection",
    "CiOptions",
    "ClusterSection",
    "DataSection",
    "DebugSection",
    "EmaSection",
    "EvalDataset",
    "EvalSection",
    "LoggingSection",
    "LoraSection",
    "ModelSection",
    "OptimizerSection",
    "RewardSection",
    "RewardTerm",
    "RolloutSection",
    "RunSection",
    "SamplingSection",
    "SdeSection",
    "Section",
    "SyncSection",
    "TrainSection",
    "TrustSection",
]
