"""Ways to shard a transformer with FSDP2 for one training step, and the step itself in phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from common import ALPHA, RANK, Row, Scale, inputs, mean_square, targets, transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from drl.lora import LoraConfig, inject
from drl.model import parallel
from drl.stages.step import clip_on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
Wrap = Literal["none", "blocks", "adapters apart", "adapters ignored", "drl"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a step is set up.

    ``base``: dtype of the base weights, or of all when they are trained. ``wrap``: "blocks" is one
    group a block and one for the rest, "adapters apart" gives the adapters of a block a group of
    their own, "adapters ignored" replicates them and sums their gradients here, "drl" is what drl does.
    ``frozen``: drl's base is "sharded" or "whole". ``policy``: groups compute in bf16 and reduce in float32.
    ``reshard``: after the forward. ``update``: AdamW's loop over tensors, or its fused kernel; the
    default of torch for sharded parameters is the loop. ``profile``: look at the kernels of a step.
    """

    name: str
    wrap: Wrap
    adapters: bool = True
    base: torch.dtype = BF16
    policy: bool = False
    reshard: bool = True
    frozen: str = "sharded"
    autocast: bool = True
    update: Literal["loop", "foreach", "fused"] = "fused"
    profile: bool = False

    @property
    def kind(self) -> str:
        """What is trained: "adapters" or "full" weights."""
        return "adapters" if self.adapters else "full"


VARIANTS = (
    Variant(name="adapters: unwrapped", wrap="none", profile=True),
    Variant(name="adapters: unwrapped, loop AdamW", wrap="none", update="loop"),
    Variant(name="adapters: unwrapped, float32 base", wrap="none", base=FP32),
    Variant(
        name="adapters: naive (loop AdamW)",
        wrap="blocks",
        policy=True,
        autocast=False,
        update="loop",
        profile=True,
    ),
    Variant(
        name="adapters: naive, fused AdamW",
        wrap="blocks",
        policy=True,
        autocast=False,
    ),
    Variant(name="adapters: naive, fused, autocast", wrap="blocks", policy=True),
    Variant(
        name="adapters: naive, fused, kept after forward",
        wrap="blocks",
        policy=True,
        autocast=False,
        reshard=False,
    ),
    Variant(name="adapters: mixed dtypes, no policy", wrap="blocks"),
    Variant(name="adapters: apart, no policy", wrap="adapters apart"),
    Variant(name="adapters: ignored", wrap="adapters ignored"),
    Variant(name="adapters: drl, sharded", wrap="drl", profile=True),
    Variant(name="adapters: drl, sharded, kept after forward", wrap="drl", reshard=False),
    Variant(name="adapters: drl, whole", wrap="drl", frozen="whole"),
    Variant(name="full: unwrapped", wrap="none", adapters=False, base=FP32),
    Variant(
        name="full: naive, fused AdamW",
        wrap="blocks",
        adapters=False,
        base=FP32,
        policy=True,
        autocast=False,
    ),
    Variant(name="full: drl", wrap="drl", adapters=False, base=FP32),
)


def model_of(variant: Variant, scale: Scale, device: str, mesh: DeviceMesh) -> nn.Module:
    """Return the model, checkpointed and wrapped; adapters are not zero."""
    model = transformer(scale, device, variant.base)
    if variant.adapters:
        config = LoraConfig(rank=min(RANK, scale.rank), alpha=ALPHA, target_modules=targets())
        generator = torch.Generator().manual_seed(2)
        inject(model, config, generator=generator, dtype=FP32)
        for parameter in trained(model):
            if not parameter.any():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.02 * drawn)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    return wrapped(variant, model.train(), mesh)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


def wrapped(variant: Variant, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the model as the variant says."""
    if variant.wrap == "none":
        return model
    if variant.wrap == "drl":
        parallel.shard(
            model,
            wrap=("JointTransformerBlock",),
            mesh=mesh,
            forward_dtype="bf16",
            frozen=variant.frozen if variant.reshard else "kept",
        )
        return model
    ignored = set(trained(model)) if variant.wrap == "adapters ignored" else set()
    policy = MixedPrecisionPolicy(
        param_dtype=BF16 if variant.policy else None,
        reduce_dtype=FP32,
        cast_forward_inputs=variant.policy,
    )

    def shard(part: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        fully_shard(
            part,  # type: ignore[arg-type]
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            ignored_params=ignored or None,
        )

    for block in model.transformer_blocks:  # type: ignore[union-attr]
        if variant.wrap == "adapters apart":
            shard(adapters_of(block), reshard=False)
        shard(block, reshard=variant.reshard)
    shard(model, reshard=False)
    return model


def adapters_of(block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block that hold a trained parameter themselves."""
    return [
        module
        for module in block.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]


class Step:
    """One optimizer step on a fixed batch, phase by phase."""

    def __init__(self, variant: Variant, scale: Scale, device: str, mesh: DeviceMesh) -> None:
        self.variant = variant
        self.model = model_of(variant, scale, device, mesh)
        self.parameters = trained(self.model)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=1e-4,
            fused=variant.update == "fused",
            foreach=variant.update == "foreach",
        )
        rank = mesh.get_rank()
        self.ranks = parallel.Ranks(rank=rank, world=mesh.size(), mesh=mesh)
        self.given: Row = inputs(scale, device, BF16 if self.low else FP32, seed=1 + rank)
        self.kind = device.partition(":")[0]
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.first_norm = 0.0

    @property
    def low(self) -> bool:
        """True when activations are bf16 throughout."""
        return self.variant.base == BF16 or self.variant.policy

    def phases(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """Return the parts of a step in order."""
        return (
            ("forward", self.forward),
            ("backward", self.backward),
            ("clip", self.clip),
            ("update", self.update),
        )

    def __call__(self) -> None:
        """Take a step."""
        for _, phase in self.phases():
            phase()

    def precision(self) -> AbstractContextManager[object]:
        """Return autocast where the variant wants it."""
        return torch.autocast(self.kind, BF16) if self.variant.autocast else nullcontext()

    def forward(self) -> None:
        """Predict."""
        with self.precision():
            self.loss = mean_square(self.model(**self.given))

    def backward(self) -> None:
        """Leave gradients in the parameters, summed over ranks."""
        assert self.loss is not None
        self.loss.backward()  # type: ignore[no-untyped-call]
        self.loss = None
        if self.variant.wrap == "adapters ignored":
            self.reduce()
        if self.variant.wrap == "drl":
            parallel.sum_whole_gradients(self.parameters, self.ranks)

    def reduce(self) -> None:
        """Average replicated gradients over ranks, all in one collective."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        flat /= dist.get_world_size()
        parts = flat.split([gradient.numel() for gradient in gradients])
        shaped = [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(gradients, shaped)

    def clip(self) -> None:
        """Clip by global norm; drl's way works on the local parts of sharded gradients."""
        if self.variant.wrap == "drl":
            named = [("", p) for p in self.parameters if p.grad is not None]
            norm, _ = clip_on_ranks(named, 1.0, self.ranks)
            self.norm = torch.tensor(norm)
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        total = get_total_norm(gradients)
        clip_grads_with_norm_(self.parameters, 1.0, total)
        self.norm = total

    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradient, equal for every variant up to rounding."""
        assert self.norm is not None
        whole = self.norm.full_tensor() if isinstance(self.norm, DTensor) else self.norm
        return float(whole)

    def update(self) -> None:
        """Let AdamW step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
