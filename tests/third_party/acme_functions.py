"""A third-party module of functions that a recipe names by their path."""

from __future__ import annotations

from drl.api import DataSource, Prompt
from drl.builtin.functions_rollout import own

DRL_API = (1, 0)

SEEN = []
"""What the functions were given, in order."""


async def tone(run, samples):
    SEEN.append(("tone", len(samples)))
    return [float(sample.media.pixels[0].double().mean()) for sample in samples]


def one_short(run, rollout_id, data_source, *, evaluation=False):
    """Drl's own rollout, with one sample less in its first group."""
    rollout = own(run, rollout_id, data_source, evaluation=evaluation)
    if not evaluation:
        del rollout.groups[0].samples[-1]
    return rollout


class Written(DataSource):
    """Prompts that nobody reads from a file."""

    def take(self, count):
        return [Prompt(row=row, text=f"written sign {row}") for row in range(1, count + 1)]

    def state(self):
        return {}

    def restore(self, state):
        pass


def own_prompts(run, rollout_id, data_source):
    SEEN.append(("blank", [prompt.text for prompt in data_source.take(2)]))
    return own(run, rollout_id, Written(None, run.context))


def first_removed(run, groups):
    groups[1].samples[0].remove_sample = True


def log(rollout_id, run, samples, extra_metrics, rollout_time):
    SEEN.append(("log", rollout_id, len(samples), rollout_time > 0))
    extra_metrics["mine/samples"] = len(samples)
    return False


def quiet_log(rollout_id, run, samples, extra_metrics, rollout_time):
    return True


def eval_log(rollout_id, run, data, extra_metrics):
    SEEN.append(("eval", rollout_id, {name: len(samples) for name, samples in data.items()}))
    extra_metrics["eval/mine"] = 0.5
    return True
