"""What deterministic training asks of attention kernels and of the environment; known without torch."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "NCCL_DETERMINISTIC": ("1",),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
}
"""Values with which a variable leaves no room for chance; the first one is set where there is none.

The two of cuBLAS are those that torch accepts, and its documentation gives the reason: with other
workspaces the sums of a matrix product on several streams come in an order that varies.
"""

DISPATCH_VARIABLE = "DIFFUSERS_ATTN_BACKEND"
"""Names the attention kernel for models of which nobody says it."""

FLASH_ENTRIES: Mapping[str, str] = {
    "flash": "flash_attn_func",
    "flash_varlen": "flash_attn_varlen_func",
    "_flash_3": "flash_attn_3_func",
}
"""Attention backends outside torch that can be told to be deterministic, and the function to tell it.

The other variants of flash attention fetch their kernels, or call them through an operator that drops
the argument.
"""

COVERED = ("native", "math")
"""Parts of the names of torch's own kernels, which follow torch's own switch."""


def is_native(backend: str | None) -> bool:
    """True for the attention kernels that torch itself makes deterministic; names ignore case."""
    return backend is None or any(part in backend.lower() for part in COVERED)


def flash_entry(backend: str | None) -> str | None:
    """Return the function that a flash backend calls; None for torch's own kernels and unknown names."""
    return None if backend is None else FLASH_ENTRIES.get(backend.lower())


def attention_problem(backend: str | None) -> str | None:
    """Say why a backend of this name cannot be deterministic; None when it can."""
    if is_native(backend) or flash_entry(backend) is not None:
        return None
    return (
        f"{backend!r} has no deterministic form; train.deterministic works with torch's own kernels "
        f"(unset, or a name with {' or '.join(repr(part) for part in COVERED)}) and with "
        f"{', '.join(FLASH_ENTRIES)}"
    )


def deterministic_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are still to be set beside those that are given."""
    return {name: values[0] for name, values in VARIABLES.items() if name not in given}


def defeated(given: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with the variables that are given, by name."""
    wrong = {
        name: f"{given[name]!r}, which leaves results to chance; train.deterministic needs "
        f"{' or '.join(values)}, or the variable unset"
        for name, values in VARIABLES.items()
        if name in given and given[name] not in values
    }
    kernel = given.get(DISPATCH_VARIABLE)
    problem = attention_problem(kernel)
    return wrong if problem is None else {**wrong, DISPATCH_VARIABLE: f"{kernel!r}: {problem}"}
