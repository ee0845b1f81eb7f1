"""``Recipe``: a resolved recipe, one frozen section after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.config.sections import (
    SECTIONS,
    AlgorithmSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    DebugSection,
    EmaSection,
    EvalSection,
    LoggingSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    SdeSection,
    SyncSection,
    TrainSection,
    TrustSection,
)
from drl.errors import Problem
from drl.kinds import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from drl.catalog import Catalog
    from drl.options import Options


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """A recipe that passed every check. Stages get their section, never the whole.

    ``source``: name of the recipe file. ``path``: the file. ``origins``: by dotted path, where each
    value came from: "default", "auto", "plugin NAME", a file name or "--set". ``warnings``: problems
    that stop nothing. ``tables``: the option tables, by kind and table name. ``rollouts_per_epoch``:
    iterations of one pass over the data, where ``train.num_epoch`` gave the length of the run.
    """

    source: str
    path: Path
    run: RunSection
    model: ModelSection
    lora: LoraSection
    cluster: ClusterSection
    train: TrainSection
    optimizer: OptimizerSection
    ema: EmaSection
    rollout: RolloutSection
    sampling: SamplingSection
    sde: SdeSection
    data: DataSection
    eval: EvalSection
    algorithm: AlgorithmSection
    reward: RewardSection
    checkpoint: CheckpointSection
    logging: LoggingSection
    sync: SyncSection
    trust: TrustSection
    debug: DebugSection
    tables: Mapping[tuple[str, str], Options | None]
    origins: Mapping[str, str]
    warnings: tuple[Problem, ...] = ()
    rollouts_per_epoch: int | None = None
    catalog: Catalog = field(repr=False)

    def options(self, kind: str, name: str) -> Options | None:
        """Return the options of a component, its defaults when the recipe has no table for it.

        None when the component has no options. A reward is asked for by the name of its term.
        """
        if (kind, name) in self.tables:
            return self.tables[kind, name]
        model = self.catalog.options_model(kind, name)
        return None if model is None else model()

    def term_options(self, name: str) -> Options | None:
        """Return the options of a reward term."""
        return self.options("reward", name)

    @property
    def step_share(self) -> float | None:
        """Share of the sampling steps that a sample is trained at; None when the step strategy says it."""
        entry = self.catalog.find("loss", self.algorithm.loss)
        option = entry.component.facts.get("step_share")
        if option is None:
            return None
        share: float = vars(self.options("loss", self.algorithm.loss))[option]
        return share

    def resolved(self) -> dict[str, Any]:
        """Return sections of plain values as a recipe file holds them; what is unset is left out.

        Secrets are the ``env:NAME`` that the recipe holds, never their values.
        """
        return {name: self._section(name) for name in SECTIONS}

    def section(self, name: str) -> Options:
        """Return a section by its name; AttributeError when there is none."""
        found: Options = self.__getattribute__(name)
        return found

    def _section(self, name: str) -> dict[str, Any]:
        values = as_plain(self.section(name))
        for (kind, table), options in sorted(self.tables.items()):
            if options is not None and BY_NAME[kind].section == name:
                values[table] = as_plain(options)
        return values

    def to_toml(self) -> str:
        """Return a recipe file that resolves to the same values, on this machine and on others."""
        import tomli_w

        return tomli_w.dumps({name: table for name, table in self.resolved().items() if table})


def as_plain(options: Options) -> dict[str, Any]:
    """Return an option model as TOML values, without what is unset."""
    from pydantic import SecretStr

    values = options.model_dump(mode="json", exclude_none=True)
    for key, value in vars(options).items():
        if isinstance(value, SecretStr):  # checked to be env:NAME
            values[key] = value.get_secret_value()
    return values
