"""The table of plugin kinds. Adding a kind is adding a row here, an interface and a hook.

Functions are one kind with slots: each slot is an option that takes one function, and its Protocol.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component.

    ``option`` is the recipe key that picks a component, ``section`` the recipe section whose
    sub-table ``[section.<name>]`` holds its options, ``hook`` the registration hook, ``interface``
    the ABC as ``module:Class``, ``prefix`` how its distributions are named. Of functions each slot has
    its own option and interface, and none has options.
    """

    name: str
    plural: str
    option: str
    section: str
    hook: str
    interface: str
    prefix: str


FUNCTION = "function"


def _kind(name: str, plural: str, option: str, interface: str, prefix: str) -> Kind:
    section = option.split(".", maxsplit=1)[0]
    return Kind(name, plural, option, section, f"drl_register_{plural}", interface, prefix)


KINDS: tuple[Kind, ...] = (
    _kind("family", "families", "model.family", "drl.interfaces.family:Family", "drl-family-"),
    _kind("engine", "engines", "rollout.engine", "drl.interfaces.engine:Engine", "drl-engine-"),
    _kind(
        "data_source", "data_sources", "data.source", "drl.interfaces.data:DataSource", "drl-data-"
    ),
    _kind(
        "step_strategy",
        "step_strategies",
        "sde.step_strategy",
        "drl.interfaces.steps:StepStrategy",
        "drl-steps-",
    ),
    _kind("sde_backend", "sde_backends", "sde.type", "drl.interfaces.steps:SdeBackend", "drl-sde-"),
    _kind("reward", "rewards", "reward.type", "drl.interfaces.reward:Reward", "drl-reward-"),
    _kind(
        "advantage",
        "advantages",
        "algorithm.advantage_estimator",
        "drl.interfaces.advantage:AdvantageEstimator",
        "drl-advantage-",
    ),
    _kind("loss", "losses", "algorithm.loss", "drl.interfaces.loss:Loss", "drl-loss-"),
    _kind("updater", "updaters", "sync.updater", "drl.interfaces.updater:Updater", "drl-updater-"),
    _kind("logger", "loggers", "logging.loggers", "drl.interfaces.logger:Logger", "drl-logger-"),
    _kind(FUNCTION, "functions", "", "", "drl-function-"),
)

BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Slot:
    """An option that takes one function; ``interface`` is its Protocol as ``module:Class``."""

    option: str
    interface: str
    summary: str


def _slot(option: str, protocol: str, summary: str) -> Slot:
    return Slot(option, f"drl.interfaces.functions:{protocol}", summary)


SLOTS: tuple[Slot, ...] = (
    _slot("model.backend", "ModelBackend", "Loads a component for training."),
    _slot("rollout.function", "RolloutFunction", "Makes a whole rollout."),
    _slot("rollout.custom_generate", "CustomGenerate", "Makes the samples of one request."),
    _slot(
        "rollout.dynamic_sampling_filter",
        "DynamicSamplingFilter",
        "Keeps a group or has another drawn.",
    ),
    _slot("rollout.sample_filter", "SampleFilter", "Takes single samples out of the loss."),
    _slot("rollout.buffer_filter", "BufferFilter", "Chooses the groups that leave the buffer."),
    _slot("rollout.custom_convert", "CustomConvert", "Turns samples into training pairs."),
    _slot(
        "rollout.custom_expand",
        "CustomExpand",
        "Turns samples with advantages into training pairs.",
    ),
    _slot(
        "rollout.custom_log", "CustomLog", "Sees the samples of an iteration before it is logged."
    ),
    _slot(
        "rollout.custom_eval_log",
        "CustomEvalLog",
        "Sees the samples of an evaluation before it is logged.",
    ),
    _slot("eval.function", "RolloutFunction", "Makes the samples of an evaluation."),
    _slot("algorithm.custom_prepare", "CustomPrepare", "Makes the inputs of the model."),
    _slot("algorithm.custom_loss", "CustomLoss", "Computes the loss of a micro-batch."),
    _slot("reward.custom", "CustomReward", "Scores samples."),
    _slot("reward.custom_post_process", "CustomPostProcess", "Turns rewards into advantages."),
)

SLOT_BY_OPTION: dict[str, Slot] = {slot.option: slot for slot in SLOTS}
