"""Base of every option table. A plugin's ``config.py`` imports this module and nothing heavier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Field", "Options"]


class Options(BaseModel):
    """A frozen table of recipe options that refuses unknown keys.

    Limits and help stand at the field (``Field(default, gt=0, description="…")``) and feed checking,
    ``drl config explain`` and the JSON schema alike.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, validate_default=True, allow_inf_nan=False
    )
