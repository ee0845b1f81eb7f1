"""A run that collects without a model: real data source, rewards and buffer, and an engine that only makes up."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drl.builtin.config_data import JsonlOptions
from drl.builtin.data_jsonl import JsonlSource
from drl.cluster.rewards import FunctionRewards, InlineRewards, Term, TermSpec
from drl.interfaces.reward import Reward, Workers
from drl.stages.filters import use_buffer_filter
from drl.testing import make_sample
from drl.types import Context, Dropped, Rollout, RolloutRequest, Sample, Score

SETTINGS: dict[str, dict[str, Any]] = {
    "rollout": {
        "batch_size": 2,
        "n_samples_per_prompt": 2,
        "microgroup_size": 1,
        "over_sampling_batch_size": None,
        "max_draws": 8,
        "seed": 5,
        "shared_start": False,
        "buffer_filter": None,
    },
    "sampling": {
        "num_steps": 4,
        "height": 16,
        "width": 16,
        "num_frames": 1,
        "fps": None,
        "flow_shift": None,
        "guidance_scale": 1.0,
        "guidance_scale_2": None,
        "true_cfg_scale": None,
        "negative_prompt": None,
        "generator_device": "cpu",
    },
    "sde": {"type": "ode", "noise_level": 0.0, "log_prob_no_const": False, "num_steps": 0},
    "reward": {"group": False, "on_failure": "error", "key": None},
    "trust": {"settings": True},
    "debug": {"engine_debug": False},
}


class Row(Reward):
    """Scores by prompt row and member, and writes down how many samples each call had."""

    def __init__(self) -> None:
        super().__init__(None, Context())
        self.calls: list[list[int]] = []

    def workers(self) -> Workers:
        return Workers(processes=0)

    async def score(self, samples: Any) -> list[Score]:
        self.calls.append([sample.index for sample in samples])
        return [
            Score(value=s.prompt.row + 0.5 * s.member, parts={"member": float(s.member)})
            for s in samples
        ]


class Engines:
    """Makes what is asked, after a wait that differs from request to request."""

    engine = SimpleNamespace(capabilities=lambda: SimpleNamespace(echoes=frozenset()))

    def __init__(self, order: int = 0) -> None:
        self.random = random.Random(order)
        self.asked: list[RolloutRequest] = []

    async def generate(self, request: RolloutRequest) -> list[Sample]:
        self.asked.append(request)
        for _ in range(self.random.randrange(40)):
            await asyncio.sleep(0)
        return [
            made(request, seed, m) for seed, m in zip(request.seeds, request.members, strict=True)
        ]


def made(request: RolloutRequest, seed: int, member: int) -> Sample:
    sample = make_sample(group_index=request.group_index, member=member, seed=seed)
    sample.prompt = request.prompt
    return sample


def settings(**changes: Any) -> Any:
    """The recipe with options changed by ``section__key``."""
    tables = {name: dict(table) for name, table in SETTINGS.items()}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        tables[section][key] = value
    return SimpleNamespace(**{n: SimpleNamespace(**table) for n, table in tables.items()})


def runs_in(folder: Path) -> Any:
    """Return what makes a run over eight prompts in a folder.

    It takes functions by option, the order in which requests are done (a seed), what plugins drop, and
    options of the recipe as ``section__key``.
    """
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"sign {n}"}) + "\n" for n in range(8)))
    section = SimpleNamespace(
        prompt_data=file, input_key="input", metadata_key="metadata", on_broken_row="refuse"
    )

    def make(functions: Any = None, *, order: int = 0, drop: Any = None, **changes: Any) -> Any:
        chosen = functions or {}
        spec = TermSpec(plugin="row", options=None, context=Context())
        terms = InlineRewards([Term("row", 1.0, Row(), spec)])
        answers = (lambda run, group: [drop(group)]) if drop else (lambda run, group: [])
        run = SimpleNamespace(
            recipe=settings(**changes),
            functions=SimpleNamespace(get=chosen.get),
            source=JsonlSource(JsonlOptions(), Context(section=section)),
            engines=Engines(order),
            rewards=FunctionRewards() if "reward.custom" in chosen else terms,
            family=SimpleNamespace(edit_request=lambda request: request),
            hooks=SimpleNamespace(
                drl_filter_group=answers, drl_rollout_finished=lambda run, rollout: None
            ),
            strategy=None,
            version=0,
            current=0,
            counters=SimpleNamespace(next_group=0, images_seen=0),
            background=SimpleNamespace(run=asyncio.run),
            progress=lambda phase, done, total: None,
            schedule=lambda sampling: None,
        )
        use_buffer_filter(run)
        return run

    return make


def drawn(rollout: Rollout) -> list[tuple[int, int]]:
    return [(group.group_index, group.prompt.row) for group in rollout.groups]


def dropping(*numbers: int) -> Any:
    return lambda group: Dropped("dull") if group.group_index in numbers else None
