"""Flow-GRPO's training as published scripts have it: diffusers' transformer, stock peft, plain torch, eager.

Nothing of the product is in it but the pairs that both train on. As in the scripts, guidance is one forward
of both predictions, negative rows first, and the host reads metrics once an optimizer step.

Axes: ``B`` pairs of a micro-batch, ``*L`` latent axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import peft
import torch
from common import ALPHA, targets
from torch import Tensor, nn

from drl.api import VISUAL, ConditionRecord, Pair, successor

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of the recipe. ``guidance`` of 1 is none."""

    noise_level: float
    guidance: float
    clip_range: float
    adv_clip_max: float
    lr: float
    weight_decay: float
    clip_grad: float


def stacked(pairs: Sequence[Pair]) -> Batch:
    """Return a micro-batch as a script keeps its samples: one tensor for each quantity, where the pairs are."""
    home = pairs[0].tensors[VISUAL].device

    def numbers(values: Sequence[float | None]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=home)

    def texts(records: Sequence[ConditionRecord | None], prefix: str) -> dict[str, Tensor]:
        there = [record.tensors for record in records if record is not None]
        return {
            f"{prefix}text": torch.stack([one["encoder_hidden_states"] for one in there]),
            f"{prefix}pooled": torch.stack([one["pooled_projections"] for one in there]),
        }

    names = ("sigma_next", "sigma_max", "log_prob_old", "advantage")
    return {
        "latents": torch.stack([pair.tensors[VISUAL] for pair in pairs]),
        "next_latents": torch.stack([pair.tensors[successor(VISUAL)] for pair in pairs]),
        "timestep": numbers([pair.timestep for pair in pairs]),
        "sigma": numbers([pair.sigma for pair in pairs]),
        **{name: numbers([pair.values[name] for pair in pairs]) for name in names},
        **texts([pair.condition for pair in pairs], ""),
        **texts([pair.negative for pair in pairs], "negative "),
    }


class PlainLoop:
    """A transformer with stock adapters, and the loop that trains them. ``dtype``: of the frozen weights."""

    def __init__(
        self, model: nn.Module, *, rank: int, device: str, dtype: torch.dtype, checkpointing: bool
    ) -> None:
        model.requires_grad_(False)
        if checkpointing:
            model.enable_gradient_checkpointing()  # type: ignore[operator]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=ALPHA,
            init_lora_weights="gaussian",
            target_modules=list(targets()),
        )
        # peft keeps the adapters in float32 beside weights of 16 bits
        self.model: nn.Module = peft.get_peft_model(model, config)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, fused=True)
        self.device = device
        self.dtype = dtype

    def step(self, batches: Sequence[Batch], settings: Settings) -> dict[str, float]:
        """Train one optimizer step on all micro-batches; return the means of its metrics, and the norm."""
        for group in self.optimizer.param_groups:
            group |= {"lr": settings.lr, "weight_decay": settings.weight_decay}
        metrics: dict[str, list[Tensor]] = {}
        self.optimizer.zero_grad()
        for given in batches:
            batch = {name: tensor.to(self.device) for name, tensor in given.items()}
            loss, figures = self.loss(batch, settings)
            (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            for name, figure in figures.items():
                metrics.setdefault(name, []).append(figure)
        norm = nn.utils.clip_grad_norm_(self.trained, settings.clip_grad)
        self.optimizer.step()
        means = {name: torch.stack(values).mean().item() for name, values in metrics.items()}
        return means | {"grad_norm": norm.item()}

    def loss(self, batch: Batch, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, a mean over its pairs, and its metrics."""
        kind = self.device.partition(":")[0]
        with torch.autocast(kind, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            velocity = self.velocity(batch, settings.guidance)
        new_B = log_prob(batch, velocity.float(), settings.noise_level)
        advantage_B = batch["advantage"].clamp(-settings.adv_clip_max, settings.adv_clip_max)
        gap_B = new_B - batch["log_prob_old"]
        ratio_B = gap_B.exp()
        lowest, highest = 1 - settings.clip_range, 1 + settings.clip_range
        clipped_B = ratio_B.clamp(lowest, highest)
        loss = torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped_B).mean()
        off_B = (ratio_B - 1).abs()
        figures = {
            "policy_loss": loss,
            "approx_kl": 0.5 * gap_B.square().mean(),
            "clipfrac": (off_B > settings.clip_range).float().mean(),
            "ratio_abs_minus_1": off_B.mean(),
        }
        return loss, {name: figure.detach() for name, figure in figures.items()}

    def velocity(self, batch: Batch, guidance: float) -> Tensor:
        """Return what the model predicts, ``(B, *L)``; guided in one forward of 2B rows."""
        names = ("latents", "timestep", "text", "pooled")
        latents, time, text, pooled = (batch[name] for name in names)
        if guidance > 1:
            latents, time = torch.cat([latents, latents]), torch.cat([time, time])
            text = torch.cat([batch["negative text"], text])
            pooled = torch.cat([batch["negative pooled"], pooled])
        output: Tensor = self.model(
            hidden_states=latents,
            timestep=time,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        if guidance <= 1:
            return output
        negative, positive = output.chunk(2)
        return negative + guidance * (positive - negative)


def log_prob(batch: Batch, velocity: Tensor, noise_level: float) -> Tensor:
    """Return ``(B,)``, the mean log-density of the recorded next latents (arXiv 2505.05470).

    The step from sigma to the next one is Gaussian around what the velocity says.
    """
    latents, after = batch["latents"].float(), batch["next_latents"].float()
    shape = (-1, *[1] * (latents.dim() - 1))
    names = ("sigma", "sigma_next", "sigma_max")
    sigma, sigma_next, sigma_max = (batch[name].reshape(shape) for name in names)
    dt = sigma_next - sigma
    # at sigma = 1 the quotient would be infinite: the table's second sigma stands in
    below_one = torch.where(sigma == 1, sigma_max, sigma)
    scale = noise_level * torch.sqrt(sigma / (1 - below_one))
    mean = latents * (1 + scale**2 / (2 * sigma) * dt)
    mean = mean + velocity * (1 + scale**2 * (1 - sigma) / (2 * sigma)) * dt
    std = scale * torch.sqrt(-dt)
    density = -((after - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return density.mean(dim=tuple(range(1, density.dim())))
