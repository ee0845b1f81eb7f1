"""Where every random number comes from: a function of run seed, purpose and ids, never of rank or order.

Sample seeds are the plain integers of the engine protocol (rl-post-training reference 9.4).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator

SEED_MODULUS = 2**31
"""Sample seeds start over here; servers take them as signed 32-bit integers."""


def stream_seed(seed: int, purpose: str, *ids: int) -> int:
    """Return 63 bits of blake2b over (seed, purpose, ids); equal on every machine and version."""
    key = repr((int(seed), purpose, tuple(int(number) for number in ids)))
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, purpose: str, *ids: int) -> Generator:
    """Return a CPU generator that depends on these arguments alone.

    ``purpose`` names the use ("sft_noise"), ``ids`` the thing it is for (a pair's id). torch's CPU
    generator keeps the low 32 bits of a seed, so two of about 65,000 streams may coincide.
    """
    import torch

    return torch.Generator("cpu").manual_seed(stream_seed(seed, purpose, *ids))


def group_seed(rollout_seed: int, group_index: int, n_samples_per_prompt: int) -> int:
    """Return the seed of a group: what a step strategy gets, and the seed of member 0."""
    return (rollout_seed + group_index * n_samples_per_prompt) % SEED_MODULUS


def sample_seed(rollout_seed: int, group_index: int, n_samples_per_prompt: int, member: int) -> int:
    """Return the noise seed of one sample; how a group is cut into microgroups does not matter."""
    return group_seed(rollout_seed, group_index, n_samples_per_prompt) + member


def evaluation_seed(base_seed: int, member: int) -> int:
    """Return the seed of the j-th sample of an evaluated prompt: the same for every prompt."""
    return base_seed + member
