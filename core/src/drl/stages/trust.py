"""Trust: samples are what was asked for, log-probs are what the trainer computes.

What an engine echoes is compared with the request; what it cannot echo is checked from shapes and
sigmas where that is possible, and listed as unproven otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch

from drl.errors import TrustError
from drl.types import Need, ParityReport, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drl.interfaces.loss import Loss
    from drl.run import Run
    from drl.types import Shard

CHECKED_ANYWAY = frozenset({"num_steps", "height", "width", "num_frames", "flow_shift"})
"""Fields that show in shapes and sigmas, whether or not the engine echoes them."""


def check_samples(run: Run, request: RolloutRequest, samples: Sequence[Sample]) -> None:
    """Raise TrustError when samples differ from their request or come from other weights."""
    if len(samples) != len(request.seeds):
        raise TrustError(
            f"group {request.group_index}: asked for {len(request.seeds)} samples, got {len(samples)}"
        )
    for sample, seed, member in zip(samples, request.seeds, request.members, strict=True):
        if sample.seed != seed:
            raise TrustError(
                f"sample of group {sample.group_index}: asked for seed {seed}, got {sample.seed}"
            )
        check_place(sample, request, member)
        if sample.version != run.version:
            raise TrustError(
                f"sample of group {sample.group_index} was made by weights of version {sample.version}, "
                f"but the loop pushed version {run.version}"
            )
        if run.recipe.trust.settings:
            check_settings(sample, request.sampling)
            check_size(sample, request.sampling)
            check_schedule(run, sample, request)


def check_place(sample: Sample, request: RolloutRequest, member: int) -> None:
    """Compare group, member and prompt row: advantages are worked out by them."""
    asked = (request.group_index, member, request.prompt.row)
    got = (sample.group_index, sample.member, sample.prompt.row)
    if got != asked:
        raise TrustError(
            f"asked for (group, member, prompt row) {asked}, the engine returned a sample of {got}"
        )


def check_echoes(promised: frozenset[str], samples: Sequence[Sample]) -> None:
    """Raise TrustError when an engine keeps back settings that it says it echoes."""
    for sample in samples:
        silent = sorted(promised - sample.echo.keys())
        if silent:
            raise TrustError(
                f"the engine says that it echoes {', '.join(silent)}, but a sample of group "
                f"{sample.group_index} came without; nothing would prove these settings"
            )


def check_settings(sample: Sample, asked: Sampling) -> None:
    """Compare every setting that the engine echoed with the request."""
    settings = asdict(asked)
    wrong = {
        name: (value, settings.get(name))
        for name, value in sample.echo.items()
        if not _same(value, settings.get(name))
    }
    if wrong:
        lines = [
            f"  {name}: asked for {want!r}, used {used!r}" for name, (used, want) in wrong.items()
        ]
        raise TrustError(
            "the engine used other settings than the recipe asks for\n" + "\n".join(lines)
        )


def _same(used: Any, asked: Any) -> bool:
    if isinstance(used, float) and isinstance(asked, int | float):
        return abs(used - asked) <= 1e-6 * max(1.0, abs(asked))
    return bool(used == asked)


def check_size(sample: Sample, asked: Sampling) -> None:
    """Compare the picture's size with the request."""
    if sample.media is None:
        return
    _, frames, height, width = sample.media.pixels.shape
    if (frames, height, width) != (asked.num_frames, asked.height, asked.width):
        raise TrustError(
            f"sample of group {sample.group_index} is {frames} frames of {width}x{height}; the recipe asks "
            f"for {asked.num_frames} of {asked.width}x{asked.height} (sampling.num_frames, width, height)"
        )


def check_schedule(run: Run, sample: Sample, request: RolloutRequest) -> None:
    """Compare the sample's sigma table and steps with the trainer's own schedule."""
    trajectory = sample.trajectory
    if trajectory is None:
        return
    expected = run.schedule(request.sampling)
    if expected is not None and not torch.allclose(trajectory.sigmas, expected, rtol=0, atol=2e-7):
        raise TrustError(
            "rollout and training use different noise schedules (sampling.flow_shift, sampling.num_steps)\n"
            f"  rollout: {_brief(trajectory.sigmas)}\n  training: {_brief(expected)}"
        )
    if trajectory.sigmas.shape[0] != request.sampling.num_steps + 1:
        raise TrustError(
            f"sampling.num_steps is {request.sampling.num_steps}, but the engine used "
            f"{trajectory.sigmas.shape[0] - 1} steps"
        )
    if request.sde_steps is not None and trajectory.sde_steps != request.sde_steps:
        raise TrustError(
            f"steps {request.sde_steps} were to be stochastic; the engine used {trajectory.sde_steps}"
        )


def _brief(sigmas: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in sigmas.tolist()) + "]"


def unproven_settings(echoes: frozenset[str]) -> list[str]:
    """Return the settings that neither an echo nor a shape can prove."""
    return sorted({f.name for f in fields(Sampling)} - echoes - CHECKED_ANYWAY)


def prove_parity_once(run: Run, shards: Sequence[Shard]) -> None:
    """Before this process's first optimizer step, replay the rollout and compare log-probs.

    A loss that scores no recorded step has nothing to compare.
    """
    if run.parity is not None or not run.recipe.trust.parity:
        return
    if not {Need.TRANSITION, Need.OLD_LOG_PROB} <= run.loss.needs:
        return
    report = run.trainer.replay(shards)
    run.parity = report
    limit = run.recipe.trust.max_log_prob_diff
    if not report.worst <= limit:
        raise TrustError(_parity_text(report, limit))
    run.event(
        f"parity: max |Δ log-prob| {report.worst:.2e} over {report.rows} pairs (limit {limit:.0e})"
    )
    clipped = clipped_by_rounding(report, run.loss)
    if clipped:
        run.event(clipped)


def clipped_by_rounding(report: ParityReport, loss: Loss) -> str | None:
    """Return a warning where ratios of unchanged weights are clipped, None where they are not.

    To first order ``|exp(d) - 1|`` is ``|d|``, so the mean difference of log-probs is that of ratios.
    """
    width = loss.ratio_width
    if width is None or loss.recomputes_old_log_prob:
        return None
    wide = {step: mean for step, mean in report.mean_by_step.items() if mean > width}
    if not wide:
        return None
    steps = ", ".join(f"{step}: {mean:.1e}" for step, mean in sorted(wide.items()))
    return (
        f"warning: rounding alone moves ratios further from 1 than the loss clips them at ({width:.0e}); mean by "
        f"step: {steps}. What these steps teach is cut at random. recompute_old_log_prob of the "
        "loss takes the engine out of it, "
        'rollout.local.adapters = "applied" lessens it where they are merged, or leave these steps out'
    )


def _parity_text(report: ParityReport, limit: float) -> str:
    steps = "\n".join(f"  step {step}: {value:.3e}" for step, value in report.by_step.items())
    return (
        f"rollout and trainer disagree before the first optimizer step: |Δ log-prob| up to "
        f"{report.worst:.3e}, trust.max_log_prob_diff allows {limit:.1e}\n{steps}\n"
        "equal dtypes (train.forward_dtype) and equal batch shapes (train.micro_batch_size, "
        "rollout.local.rows) bring them together; merged adapters are rounded with the weights, applied ones are "
        "not (rollout.local.adapters); drl align tries what it is"
    )
