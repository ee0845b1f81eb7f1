"""Windows of every loss, with every pass it can ask for, on a model of one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from small_trainer import Toy
from torch import Tensor, nn

from drl.api import VISUAL, Context, Loss, Need, Pair, Sample, Shard, StepContext, rejected
from drl.interfaces.family import Route
from drl.mathematics.gaussian import over_rows
from drl.stages.loss import Forward
from drl.stages.pairs import build_shards
from drl.testing import make_sample
from drl.types import Condition, Guidance
from drl_loss_awm.config import AwmConfig
from drl_loss_awm.loss import Awm
from drl_loss_dpo.config import DpoConfig
from drl_loss_dpo.loss import Dpo
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss
from drl_loss_grpo_guard.config import GrpoGuardConfig
from drl_loss_grpo_guard.loss import GrpoGuard
from drl_loss_nft.config import NftConfig
from drl_loss_nft.loss import Nft
from drl_loss_sft.config import SftLossConfig
from drl_loss_sft.loss import SftLoss
from drl_sde_flow.flow import FlowSde

WIDTH = 4
STEPS = 4
SECTION = SimpleNamespace(
    kl_beta=0.1,
    adv_clip_max=5.0,
    noise_level=0.7,
    log_prob_no_const=False,
    ref_mode="lora_base",
)
CONTEXT = StepContext(section=SECTION)


class Mixing(nn.Module):
    """A matrix over the last latent axis, moved by time and text; dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrix = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, generator=generator))
        self.dropout = nn.Dropout(dropout)
        self.rows: list[int] = []

    def forward(self, x: Tensor, time_B: Tensor, text: Tensor) -> Tensor:
        self.rows.append(len(x))
        shift_B = time_B / 1000 + text.flatten(1).mean(1)
        moved: Tensor = self.dropout(x @ self.matrix) + over_rows(shift_B, x)
        return moved


def collate(rows: list[Condition]) -> Condition:
    text = torch.cat([row.arguments["text"] for row in rows])
    return Condition(arguments={"text": text}, rows=len(text))


FAMILY: Any = Toy(
    condition=lambda record: Condition(arguments={"text": record.tensors["text"][None]}),
    collate=collate,
    route=lambda timestep: Route(),
    model_time=lambda sigma_B, timestep_B: timestep_B if timestep_B is not None else 1000 * sigma_B,
    forward=lambda model, streams, time_B, condition: {
        VISUAL: model(streams[VISUAL], time_B, condition.arguments["text"])
    },
    guide=lambda positive, negative, guidance: {
        VISUAL: negative[VISUAL] + guidance.scale * (positive[VISUAL] - negative[VISUAL])
    },
)

LOSSES: dict[str, Callable[[], Loss]] = {
    "policy_loss": lambda: PolicyLoss(PolicyLossConfig(clip_range=0.5), CONTEXT),
    "policy_loss, recomputed": lambda: PolicyLoss(
        PolicyLossConfig(clip_range=0.5, recompute_old_log_prob=True), CONTEXT
    ),
    "grpo_guard": lambda: GrpoGuard(GrpoGuardConfig(), CONTEXT),
    "nft": lambda: Nft(NftConfig(), CONTEXT),
    "awm": lambda: Awm(AwmConfig(), CONTEXT),
    "sft_loss": lambda: SftLoss(SftLossConfig(sigma_buckets=3), CONTEXT),
    "dpo": lambda: Dpo(DpoConfig(), CONTEXT),
}


def forward_of(
    loss: Loss,
    device: str = "cpu",
    *,
    scale: float = 4.5,
    batched: bool = False,
    dtype: str = "fp32",
    dropout: float = 0.0,
) -> Forward:
    """Return the forward of a loss with the old policy's and the reference's pass, where it wants them."""
    policies: dict[str, Any] = {}
    if Need.OLD_PREDICTION in loss.needs:
        policies["old"] = lambda component: nullcontext()
    if Need.REFERENCE in loss.needs:
        policies["reference"] = lambda component: nullcontext()
    return Forward(
        family=FAMILY,
        models={"transformer": Mixing(dropout).to(device)},
        loss=loss,
        backend=FlowSde(None, Context(section=SECTION)) if Need.ROLLOUT in loss.needs else None,
        device=torch.device(device),
        dtype=dtype,
        guidance={"guidance_scale": Guidance(scale=scale)},
        batched_guidance=batched,
        **policies,
    )


def samples_of(count: int) -> list[Sample]:
    """Return scored samples with what any loss trains on; the last step is left to be deterministic."""
    samples = []
    for index in range(count):
        sample = make_sample(index=index, group_index=index // 2, seed=index, steps=STEPS)
        assert sample.trajectory is not None
        final = sample.trajectory.latents[VISUAL][-1]
        sample.reward = math.sin(index)
        sample.clean = {VISUAL: final}
        samples.append(sample)
    return samples


def shard_of(loss: Loss, count: int = 6, *, micro: int = 4, steps: int = 1) -> Shard:
    """Return the pairs of some samples, in micro-batches; the last one is filled up."""
    units: list[list[Pair]] = []
    for sample in samples_of(count):
        if isinstance(loss, Dpo):
            assert sample.clean is not None
            sample.clean = {**sample.clean, rejected(VISUAL): -sample.clean[VISUAL]}
        units.append(loss.expand([sample], [math.cos(sample.index)], CONTEXT))
    (shard,) = build_shards(units, steps=steps, micro_batch_size=micro, ranks=1, rollout_id=0)
    return shard
