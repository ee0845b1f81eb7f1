"""Weights to engines: units, buckets, push, and the proof that they arrived and changed something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from drl.errors import SyncError
from drl.interfaces.engine import LoraFields, WeightProof
from drl.interfaces.updater import PackedUnits, PushReport, Updater
from drl.lora import adapters, merged_state, to_plain_name, uniform_rank_alpha
from drl.lora.sharding import full_tensor
from drl.mathematics.packing import pack_by_size
from drl.observe.summary import record_push
from drl.stages.residence import for_sync

if TYPE_CHECKING:
    from torch import Tensor, nn

    from drl.run import Run

LEVELS = ("off", "counts", "names", "checksum")
PROVED = {
    "off": "not verified (sync.verify)",
    "counts": "number of tensors equal",
    "names": "every name applied",
    "checksum": "checksum equal",
}


@dataclass(slots=True)
class SyncLog:
    """What was pushed and proven so far; the alarm compares a push with the one before."""

    pushed: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


def sync(run: Run, version: int) -> None:
    """Bring the trained weights to every engine as ``version``, and prove it."""
    if run.engines is None:
        return
    for_sync(run)
    with run.phases.phase("update_weights"):
        run.background.run(run.engines.recover())
        handles = run.engines.handles()
        run.engines.begin_update(version)
        reports = run.trainer.push(version, handles)
        proofs = run.engines.end_update(version)
    level = proof_level(run.recipe.sync.verify, [h.capabilities.proof for h in handles])
    for proof in proofs:
        check_proof(reports, proof, version, level)
        check_changed(run.syncs, reports, proof)
    for report in reports:
        record_push(run.directory, report, PROVED[level])
    run.version = version
    run.hooks.drl_weights_synced(run=run, version=version)


def proof_level(wanted: str, offered: Sequence[str]) -> str:
    """Return the level to check: "auto" is the strongest that every engine can give."""
    weakest = min((LEVELS.index(level) for level in offered), default=0)
    if wanted == "auto":
        return LEVELS[weakest]
    if LEVELS.index(wanted) > weakest:
        raise SyncError(
            f"sync.verify = '{wanted}' but an engine can only prove '{LEVELS[weakest]}'; use 'auto'"
        )
    return wanted


def check_proof(
    reports: Sequence[PushReport], proof: WeightProof, version: int, level: str
) -> None:
    """Raise SyncError when what an engine holds is not what was sent."""
    if level == "off":
        return
    if proof.version != version:
        raise SyncError(f"pushed version {version}, the engine answers with {proof.version}")
    for report in reports:
        name = report.component
        if report.missing or report.unexpected:
            raise SyncError(_names_text(report))
        if proof.counts.get(name) != len(report.names):
            raise SyncError(
                f"{name}: sent {len(report.names)} tensors, the engine wrote {proof.counts.get(name)}"
            )
        if level == "checksum" and proof.checksums.get(name) != report.checksum:
            raise SyncError(
                f"{name}: version {version} arrived damaged: checksum {report.checksum[:12]} sent, "
                f"{str(proof.checksums.get(name))[:12]} held"
            )


def _names_text(report: PushReport) -> str:
    return (
        f"{report.component}: the engine does not take these weights as they are named\n"
        f"  unknown to the engine ({len(report.unexpected)}): {list(report.unexpected[:4])}\n"
        f"  expected but not sent ({len(report.missing)}): {list(report.missing[:4])}"
    )


def check_changed(log: SyncLog, reports: Sequence[PushReport], proof: WeightProof) -> None:
    """Raise SyncError when other weights were pushed but the engine's model stayed the same.

    Not where the engine says that the change was lost in rounding to its dtype (``WeightProof.unchanged``).
    """
    for report in reports:
        name, held = report.component, proof.model_checksums.get(report.component)
        stayed = held is not None and held == log.held.get(name) and name not in proof.unchanged
        if stayed and log.pushed.get(name) != report.checksum:
            raise SyncError(
                f"{name}: new weights were pushed (checksum {report.checksum[:12]}) but the engine's model "
                "did not change; the rollout would run on old weights"
            )
        log.pushed[name] = report.checksum
        if held is not None:
            log.held[name] = held


def push_component(
    updater: Updater, component: str, model: nn.Module, version: int, *, buffer_bytes: int
) -> PushReport:
    """Push one component; raises SyncError when it has nothing to push."""
    lora = lora_fields(model) if updater.payload == "lora" else None
    buckets = (
        PackedUnits(
            names=tuple(name for unit in bucket for name, _ in unit),
            tensors=tuple(tensor for unit in bucket for _, tensor in unit),
            lora=lora,
        )
        for bucket in pack_by_size(units(updater.payload, model), unit_bytes, buffer_bytes)
    )
    report = updater.push(component, buckets, version)
    if not report.names:
        raise SyncError(f"{component}: no weights to push (payload '{updater.payload}')")
    return report


Unit = Sequence[tuple[str, "Tensor"]]


def units(payload: str, model: nn.Module) -> Iterator[Unit]:
    """Yield the tensors that must travel together, by pushed name, whole.

    Where weights are sharded each unit is gathered as it is drawn: every rank must draw all of them.
    """
    if payload == "lora":
        for fqn, adapter in adapters(model).items():
            A, B = full_tensor(adapter.A), full_tensor(adapter.B)
            yield [(f"{fqn}.lora_A", A), (f"{fqn}.lora_B", B)]
    elif payload == "merged":
        for name, tensor in merged_state(model):
            yield [(name, tensor)]
    else:
        for name, tensor in model.state_dict().items():
            yield [(to_plain_name(name), gathered(tensor))]


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor; of sharded weights always a copy.

    An engine may keep it until the end of the update, and sharded weights change in place, as when a
    moving average leaves the model. A rank that holds the only shard would gather its own memory.
    """
    whole = full_tensor(tensor)
    own = isinstance(tensor, DTensor) and same_memory(whole, tensor.to_local())
    return whole.clone() if own else whole


def same_memory(left: Tensor, right: Tensor) -> bool:
    """True when two tensors are views of one storage."""
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def unit_bytes(unit: Unit) -> int:
    """Return the size of a unit in bytes."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in unit)


def lora_fields(model: nn.Module) -> LoraFields:
    """Return rank and alpha, from the adapters themselves; SyncError for what these do not describe."""
    found = uniform_rank_alpha(model)
    if found is None:
        kinds = sorted({(adapter.rank, adapter.alpha) for adapter in adapters(model).values()})
        raise SyncError(
            f"engines merge uniform adapters only; this model has (rank, alpha) {kinds}, or rsLoRA, layers "
            "that are no Linear, trained biases, saved modules or a start taken from the base; use "
            'sync.updater = "in_process_merged"'
        )
    rank, alpha = found
    return LoraFields(rank=rank, alpha=alpha)
