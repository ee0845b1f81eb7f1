"""What a recipe names by paths: a class of every kind, like a registered one, and the trainer's parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from drl.api import Context, Family, Need, Sample, WeightSource
from drl.builtin.advantage_grpo import Grpo
from drl.builtin.config_advantages import GrpoOptions
from drl.builtin.config_data import JsonlOptions
from drl.builtin.config_steps import SdeWindowOptions
from drl.builtin.data_jsonl import JsonlSource
from drl.builtin.logger_jsonl import JsonlLogger
from drl.builtin.steps_window import SdeWindow
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.family import Sd3Family
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss
from drl_sde_cps.cps import CpsSde
from drl_sde_flow.flow import FlowSde
from drl_updater_in_process.updater import InProcessLora


class Tiny(Sd3Family):
    def __init__(self, options: None, context: Context) -> None:
        super().__init__(Sd3Options(), context)


class Engine(LocalEngine):
    def __init__(self, options: None, context: Context) -> None:
        super().__init__(LocalOptions(rows=4), context)


class Source(JsonlSource):
    def __init__(self, options: None, context: Context) -> None:
        super().__init__(JsonlOptions(), context)


class Window(SdeWindow):
    def __init__(self, options: None, context: Context) -> None:
        super().__init__(SdeWindowOptions(range=(0, 3)), context)


class Cps(CpsSde):
    """The same mathematics under another name."""

    log_prob_no_const = True
    last_step_has_variance = False


class Flow(FlowSde):
    """Other mathematics than the engine's."""


class Estimator(Grpo):
    def __init__(self, options: None, context: Context) -> None:
        super().__init__(GrpoOptions(), context)


class Policy(PolicyLoss):
    needs = frozenset({Need.ROLLOUT, Need.OLD_LOG_PROB, Need.TRANSITION, Need.GUIDANCE})

    def __init__(self, options: None, context: Context) -> None:
        super().__init__(PolicyLossConfig(clip_range=1e-2), context)


class Lora(InProcessLora):
    """The adapters' way into the engine."""


class Lines(JsonlLogger):
    """The rows of metrics.jsonl."""


BUILT: list[str] = []


def load(family: Family, component: str, source: WeightSource) -> nn.Module:
    """Load as the family does, with every parameter twice as large."""
    BUILT.append(component)
    module = family.build(component, source)
    if not source.meta:
        for parameter in module.parameters():
            parameter.data.mul_(2)
    return module


def load_nothing(family: Family, component: str, source: WeightSource) -> Any:
    """Return what no trainer can use."""
    return {}


def keep(run: Any, groups: list[Any]) -> None:
    """Take out the first sample of each group."""
    for group in groups:
        sample: Sample = group.samples[0]
        sample.remove_sample = True
