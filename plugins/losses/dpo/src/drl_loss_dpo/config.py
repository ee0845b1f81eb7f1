"""Options of the loss ``dpo``, and of the data source and the logger ``preferences``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class DpoConfig(Options):
    """Direct preference optimisation on pairs of pictures (Diffusion-DPO)."""

    beta: float = Field(
        2000.0,
        gt=0,
        description="How sharply a preference is judged; higher stays closer to the reference.",
    )
    sigma: Literal["uniform", "logit_normal"] = Field(
        "uniform", description="How noise levels are drawn, one for both pictures of a preference."
    )
    flow_shift: float = Field(
        1.0, gt=0, description="Shift of the drawn levels; above 1 they lie at higher noise."
    )


class PreferencesConfig(Options):
    """Rows of text, chosen and rejected picture, from a JSON-lines file."""

    shuffle: bool = Field(True, description="Draw each epoch in an order of its own.")


class PreferenceLoggerConfig(Options):
    """Best and worst sample of each group, as rows for the data source of the same name."""

    pairs_per_group: int = Field(
        1, gt=0, description="Best with worst, second best with second worst and so on."
    )
    min_gap: float = Field(
        0.0, ge=0, description="Pairs whose rewards differ by no more than this are left out."
    )
