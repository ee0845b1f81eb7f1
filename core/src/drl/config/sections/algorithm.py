"""Sections about the objective and the care of a run: algorithm to trust."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from drl.config.fields import (
    ByteCount,
    ComponentName,
    FunctionName,
    InputFile,
    Names,
    PlainName,
    Section,
)
from drl.dotted import table_name
from drl.options import Field, Options


class AlgorithmSection(Section):
    """The loss and what it reads."""

    loss: ComponentName = Field("policy_loss", description="Training objective.")
    advantage_estimator: ComponentName = Field("grpo", description="How rewards become advantages.")
    kl_beta: float = Field(
        0.0, ge=0, description="Weight of the KL term; above 0 a reference forward runs."
    )
    adv_clip_max: float = Field(5.0, gt=0, description="Advantages are clamped to ± this.")
    ref_mode: Literal["none", "lora_base", "ema"] | None = Field(
        None,
        description="What a KL term, and a loss that compares with a reference, are compared with: the model "
        "without its adapter, or the average of the weights (ema). Unset: lora_base where there is either, "
        "ema where that average is the loss's old policy, else none. The old policy itself is ema.enabled's "
        "average, or the weights of the rollout without one.",
    )
    custom_needs: tuple[
        Literal["rollout", "old_log_prob", "transition", "old_prediction", "reference", "guidance"],
        ...,
    ] = Field(
        ("rollout", "old_log_prob", "transition", "guidance"),
        description="What core provides to the functions of custom_loss.",
    )
    custom_prepare: FunctionName | None = Field(
        None, description="Function that makes the model's inputs, instead of the loss's own."
    )
    custom_loss: FunctionName | None = Field(
        None, description="Function that computes the loss, instead of the loss's own."
    )


class RewardTerm(Options):
    """One scorer with its weight; its options are in the table [reward.NAME]."""

    name: PlainName = Field(description="Name of the term; its options are in [reward.NAME].")
    plugin: ComponentName | None = Field(
        None, description="Reward that scores the term; the one called like the term when unset."
    )
    weight: float = Field(1.0, description="Factor in the sum; 0 is logged and not trained on.")

    @property
    def component(self) -> str:
        """Name of the reward that scores this term."""
        return self.plugin if self.plugin is not None else self.name


def distinct_terms(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    """Refuse two terms of one name, and names of core's own options, with a ValueError."""
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has two terms named {name!r}; set 'plugin' and give each its name")
        if name in RewardSection.model_fields:
            raise ValueError(f"has a term named {name!r}, which is an option of [reward]")
    return terms


class RewardSection(Section):
    """What is rewarded: one reward by ``type``, or a weighted list of ``terms``."""

    type: ComponentName | None = Field(None, description="The only reward, with weight 1.")
    terms: Annotated[tuple[RewardTerm, ...], AfterValidator(distinct_terms)] = Field(
        (), description="Weighted rewards: a list of {name, plugin, weight}."
    )
    key: str | None = Field(
        None, min_length=1, description="Part of the score that counts, when it has parts."
    )
    group: bool = Field(False, description="Score the samples of a prompt together, in one call.")
    on_failure: Literal["error", "mask"] = Field(
        "error", description="A score that failed stops the run, or its sample is left out."
    )
    custom: FunctionName | None = Field(
        None, description="Function that scores samples, instead of a reward."
    )
    custom_post_process: FunctionName | None = Field(
        None, description="Function that turns rewards into advantages, instead of the estimator."
    )

    @property
    def all_terms(self) -> tuple[RewardTerm, ...]:
        """The terms, also when the recipe only names a ``type``."""
        return (
            (RewardTerm(name=table_name(self.type), plugin=self.type, weight=1.0),)
            if self.type is not None
            else self.terms
        )


class CheckpointSection(Section):
    """When the state of a run is saved, what of it stays, and which state a run starts from."""

    save: str | None = Field(
        None, min_length=1, description="Folder of the checkpoints; the run directory when unset."
    )
    save_interval: int | None = Field(None, gt=0, description="Iterations between checkpoints.")
    every_minutes: float = Field(
        10.0, ge=0, description="Save the state for resuming this often; 0 only at the end."
    )
    asynchronous: bool = Field(
        True, description="Training goes on while a copy of its state is written."
    )
    save_optim: bool = Field(
        True, description="Save the optimizer's state; without it a run cannot be resumed exactly."
    )
    keep_last: int | None = Field(
        None, gt=0, description="Newest checkpoints that stay; all of them when unset."
    )
    keep_best: int = Field(0, ge=0, description="Best-scored checkpoints that stay besides.")
    best_metric: str | None = Field(
        None,
        pattern=r"^eval/.+",
        description='Figure of an evaluation that scores a checkpoint, such as "eval/heldout".',
    )
    best_mode: Literal["max", "min"] = Field("max", description="Which score is better.")
    load: InputFile | None = Field(
        None, description="Run, checkpoints folder or checkpoint whose state a new run starts from."
    )
    step: int | None = Field(
        None, ge=1, description="Iterations done in the checkpoint to load; the newest when unset."
    )
    load_optim: bool = Field(True, description="Take the optimizer's state from a checkpoint.")
    load_rng: bool = Field(True, description="Take the random numbers' state from a checkpoint.")


class LoggingSection(Section):
    """Where figures go."""

    loggers: Names = Field(("console", "jsonl"), description="Loggers, in any order.")


class SyncSection(Section):
    """How trained weights reach the engine."""

    updater: ComponentName = Field(
        "auto", description="What carries the weights; auto: the one that fits engine and weights."
    )
    buffer_size: ByteCount = Field(
        536_870_912, gt=0, description='Bytes of one bucket; "2GiB" is understood.'
    )
    verify: Literal["auto", "off", "counts", "names", "checksum"] = Field(
        "auto", description="Proof asked of the engine; auto: the strongest that it can give."
    )


class TrustSection(Section):
    """Checks that rollout and training are about the same model."""

    max_log_prob_diff: float | None = Field(
        None,
        gt=0,
        description="Parity limit per denoising step; 1e-5 in fp32 and 2e-3 otherwise.",
    )
    max_bad_steps: int = Field(3, gt=0, description="Non-finite steps in a row that stop the run.")
    parity: bool = Field(True, description="Compare log-probabilities before the first step.")
    settings: bool = Field(True, description="Compare the samples' settings with the request.")
