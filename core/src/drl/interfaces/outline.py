"""What ``drl plan`` must know of a family and of an engine before either has loaded anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of a pipeline besides those that are trained, with the bytes that its weights take.

    ``resident``: they stay on the device for the whole run. ``release``: the setting that sends them away.
    """

    name: str
    weight_bytes: int
    resident: bool = True
    release: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The shapes of a recipe's samples, and what a pipeline holds beside the trained components.

    ``streams``: shape ``(*L)`` of one row's latents. ``condition``: shapes of the float32 tensors of one
    ``ConditionRecord``. ``text_tokens``: as ``RowShape`` counts them. ``decode``: decodes one batch of
    ``decode_rows`` rows on the meta device, so that its memory can be counted; None where nothing is decoded.
    ``decode_dtype``: the precision that it decodes in, ``decode_compiled``: by compiled code. ``decode_option``:
    the option that sets its rows.
    """

    streams: Mapping[str, tuple[int, ...]]
    condition: Mapping[str, tuple[int, ...]]
    text_tokens: int
    parts: tuple[Part, ...] = ()
    decode: Callable[[], object] | None = None
    decode_rows: int = 1
    decode_dtype: str = "fp32"
    decode_compiled: bool = False
    decode_option: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutline:
    """How an engine in the trainer's process computes, and which weights it holds.

    ``rows``: of each forward, without guidance. ``weights``: "shared" (the trainer's own), a copy in "fp32" or
    in the "forward" precision, or "auto": shared where adapters are trained, else fp32. ``adapters``:
    "merged" or "applied". ``compiled``: its blocks are. ``weights_option``: the option that sets ``weights``.
    ``graphs_option``: the option by which it records forwards as CUDA graphs, where it does.
    ``rows_option``: the option that sets ``rows``.
    """

    rows: int
    weights: str = "fp32"
    adapters: str = "merged"
    compiled: bool = False
    weights_option: str | None = None
    graphs_option: str | None = None
    rows_option: str | None = None
