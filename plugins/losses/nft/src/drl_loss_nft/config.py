"""Options of ``nft``: the table ``[algorithm.nft]``."""

from __future__ import annotations

from drl.options import Field, Options


class NftConfig(Options):
    """Contrast of a positive and a negative policy on noised final latents (DiffusionNFT)."""

    beta: float = Field(
        1.0,
        gt=0,
        description="How far the two implicit policies lie from the old one; smaller moves faster.",
    )
    timestep_fraction: float = Field(
        0.99,
        gt=0,
        le=1,
        description="Share of the rollout's noise levels that are trained; the lowest are left out.",
    )
    adaptive_weight: bool = Field(
        True, description="Divide each squared error by the mean absolute error, without gradient."
    )
    shuffle_timesteps: bool = Field(
        True, description="Each sample has its noise levels in an order of its own."
    )
