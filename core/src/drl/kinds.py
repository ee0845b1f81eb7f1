"""The table of plugin kinds. Adding a kind is adding a row here, an interface and a hook."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component.

    ``option`` is the recipe key that picks a component, ``section`` the recipe section whose
    sub-table ``[section.<name>]`` holds its options, ``hook`` the registration hook, ``interface``
    the ABC as ``module:Class``, ``prefix`` how its distributions are named.
    """

    name: str
    plural: str
    option: str
    section: str
    hook: str
    interface: str
    prefix: str


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
)

BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}
