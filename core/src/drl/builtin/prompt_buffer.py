"""``PromptBuffer``: groups that a run gave back to a data source, until their prompts are drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drl.errors import ContractError
from drl.interfaces.data import BufferChoice
from drl.types import EMPTY, Group, Prompt, Sample


def pop_first(buffer: list[Group], count: int) -> list[Group]:
    """Take the oldest groups."""
    chosen, buffer[:] = buffer[:count], buffer[count:]
    return chosen


class PromptBuffer:
    """Groups in the order in which they came back; a choice decides which prompts leave first.

    A prompt that is drawn again is generated again, by newer weights, so of its samples only what a choice
    may look at is kept: number, seed, weights version, reward. A checkpoint holds exactly that.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.choose: BufferChoice = pop_first

    def add(self, groups: Iterable[Group]) -> None:
        """Take groups in, without their pictures and trajectories."""
        self.groups.extend(light(group) for group in groups)

    def take(self, count: int) -> list[Prompt]:
        """Return the prompts of at most ``count`` groups; ContractError when the choice breaks its rules."""
        if not self.groups or count <= 0:
            return []
        before = list(self.groups)
        chosen = self.choose(self.groups, count)
        places = {id(group) for group in before}
        if not isinstance(chosen, list) or any(id(group) not in places for group in chosen):
            raise ContractError(
                "rollout.buffer_filter must return a list of groups of the buffer, got "
                f"{type(chosen).__name__} {chosen!r}"[:300]
            )
        if len(chosen) > count or len({id(group) for group in chosen}) < len(chosen):
            raise ContractError(
                f"rollout.buffer_filter was asked for at most {count} groups, each once, and returned "
                f"{[group.group_index for group in chosen]}"
            )
        taken = {id(group) for group in chosen}
        self.groups = [group for group in self.groups if id(group) not in taken]
        return [group.prompt for group in chosen]

    def state(self) -> list[dict[str, Any]]:
        """Return the groups as JSON values."""
        return [as_plain(group) for group in self.groups]

    def restore(
        self, saved: Sequence[Mapping[str, Any]], prompt_of: Callable[[int, int], Prompt]
    ) -> None:
        """Go back to saved groups; ``prompt_of`` gives the prompt of a row and an epoch."""
        self.groups = [from_plain(one, prompt_of(one["row"], one["epoch"])) for one in saved]


def light(group: Group) -> Group:
    """Return a copy of a group with what a checkpoint can hold of its samples."""
    kept = [
        replace(
            sample,
            media=None,
            trajectory=None,
            clean=None,
            condition=None,
            negative=None,
            path_seed=None,
            echo=EMPTY,
            scores=EMPTY,
            seconds=0.0,
            removed=False,
        )
        for sample in group.samples
    ]
    return Group(group_index=group.group_index, prompt=group.prompt, samples=kept)


def as_plain(group: Group) -> dict[str, Any]:
    """Return what a checkpoint holds of a group."""
    samples = [
        {
            "index": sample.index,
            "member": sample.member,
            "seed": sample.seed,
            "version": sample.version,
            "reward": sample.reward,
        }
        for sample in group.samples
    ]
    prompt = group.prompt
    return {
        "row": prompt.row,
        "epoch": prompt.epoch,
        "group_index": group.group_index,
        "samples": samples,
    }


def from_plain(saved: Mapping[str, Any], prompt: Prompt) -> Group:
    """Return a group that ``as_plain`` made plain."""
    index = saved["group_index"]
    samples = [Sample(group_index=index, prompt=prompt, **sample) for sample in saved["samples"]]
    return Group(group_index=index, prompt=prompt, samples=samples)
