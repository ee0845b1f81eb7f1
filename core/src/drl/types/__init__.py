"""The data that travels between stages: prompt, request, sample, pair and what is made of them.

Axes: ``P`` prompts, ``G`` samples per prompt, ``B`` rows, ``S`` denoising steps (a sigma table has
``S + 1`` entries and ends in 0), ``*L`` latent axes of whatever rank. Nothing here imports torch.
"""

from __future__ import annotations

from drl.components import EMPTY
from drl.types.context import Context, Need, Role, Routes, StepContext
from drl.types.report import (
    CheckpointFacts,
    Claim,
    EvaluationReport,
    ParityReport,
    StepReport,
    Verdict,
)
from drl.types.sample import (
    Condition,
    ConditionRecord,
    Conditions,
    Dropped,
    Group,
    Media,
    MediaFile,
    Prompt,
    Rollout,
    RolloutRequest,
    Sample,
    Sampling,
    Score,
    Trajectory,
)
from drl.types.stream import VISUAL, Streams
from drl.types.training import (
    Advantages,
    ForwardInputs,
    GroupedRewards,
    Guidance,
    LossOutput,
    Metric,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    Shard,
    Transition,
    rejected,
    successor,
)

__all__ = [
    "EMPTY",
    "VISUAL",
    "Advantages",
    "CheckpointFacts",
    "Claim",
    "Condition",
    "ConditionRecord",
    "Conditions",
    "Context",
    "Dropped",
    "EvaluationReport",
    "ForwardInputs",
    "Group",
    "GroupedRewards",
    "Guidance",
    "LossOutput",
    "Media",
    "MediaFile",
    "Metric",
    "Need",
    "Pair",
    "PairBatch",
    "ParityReport",
    "Predictions",
    "Prompt",
    "Role",
    "Rollout",
    "RolloutRequest",
    "Routes",
    "Sample",
    "Sampling",
    "Score",
    "ScoredTransition",
    "Shard",
    "StepContext",
    "StepReport",
    "Streams",
    "Trajectory",
    "Transition",
    "Verdict",
    "rejected",
    "successor",
]
