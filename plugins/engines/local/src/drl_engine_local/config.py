"""Options of the engine ``local``, the recipe table ``[rollout.local]``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class LocalOptions(Options):
    """How the embedded engine fills its batches."""

    rows: int = Field(
        8,
        ge=1,
        description="Samples denoised together. Every forward runs at this row count, filled across "
        "requests and padded at the end, so that a sample does not depend on its neighbours; that holds "
        "for 1 to 4 rows and for multiples of 4.",
    )
    weights: Literal["auto", "shared", "fp32", "forward"] = Field(
        "auto",
        description="Whose weights the engine computes with: shared, the trainer's own frozen ones; or a copy "
        "in fp32, rounded in the forward as the trainer's are, or in the forward's precision, which halves "
        "its memory. auto: shared where adapters are trained in this process, else fp32.",
    )
    adapters: Literal["merged", "applied"] = Field(
        "merged",
        description="merged: adapters are added to the weights at each sync, which costs a copy of the adapted "
        "layers and makes the fastest forward; applied: computed beside the weights exactly as in the trainer.",
    )
    compile: bool = Field(
        False, description="Compile the model's blocks with torch.compile, for its fixed row count."
    )
    cuda_graphs: bool = Field(
        False,
        description="Replay each forward as one CUDA graph: pays where a forward is so small that its "
        "launches, not its work, take the time.",
    )
    wait_ms: float = Field(
        5.0,
        ge=0,
        le=1000,
        description="How long a batch that is not full waits for the next request, in milliseconds.",
    )
