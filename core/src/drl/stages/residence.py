"""Who has the device's memory: trainer and engine take turns where the recipe offloads them.

Sampling, training and syncs never overlap: each of ``for_sampling``, ``for_training`` and ``for_sync`` is
called before its phase, gives back what the phase does not need, and only then takes what it needs. A
phase that fails leaves whoever it moved where it is: the run ends, and closing works either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.interfaces.engine import Memory
from drl.model.shared import shared_tensors, unshareable

if TYPE_CHECKING:
    from torch import Tensor

    from drl.run import Run

EVERYTHING = frozenset({Memory.WEIGHTS, Memory.REST})


@dataclass(slots=True)
class Residence:
    """Who leaves the device for the other, and what is there now.

    ``trainer_leaves``: while engines sample. ``engine_leaves``: while the trainer trains. ``trainer``: it is
    awake. ``engine``: the parts that the engine has there.
    ``copies``: a line for each component whose weights could not be shared; ``told``: they were said.
    """

    trainer_leaves: bool = False
    engine_leaves: bool = False
    trainer: bool = True
    engine: frozenset[Memory] = EVERYTHING
    copies: tuple[str, ...] = ()
    told: bool = False


def residence_of(recipe: Any) -> Residence:
    """Return who leaves the device in a run of this recipe; at first everything is there."""
    return Residence(trainer_leaves=offloads_train(recipe), engine_leaves=offloads_rollout(recipe))


def offloads_train(recipe: Any) -> bool:
    """Say whether the trainer leaves the device while engines sample; weights that are elsewhere never do."""
    if recipe.train.cpu_offload:
        return False
    return _chosen(recipe.cluster.offload_train, recipe.cluster.offload)


def offloads_rollout(recipe: Any) -> bool:
    """Say whether engines give their memory back while the trainer trains."""
    return _chosen(recipe.cluster.offload_rollout, recipe.cluster.offload)


def _chosen(own: bool | None, both: bool) -> bool:
    return both if own is None else own


def for_sampling(run: Run) -> None:
    """Let the engines have the device, before a rollout or an evaluation."""
    if run.engines is None:
        return
    if run.residence.trainer_leaves:
        _sleep(run)
    _resume(run, EVERYTHING)


def for_training(run: Run) -> None:
    """Let the trainer have the device."""
    if run.engines is not None and run.residence.engine_leaves:
        _release(run)
    _wake(run)


def for_sync(run: Run) -> None:
    """Bring the weights of both sides to the device, and no more of the engine than was there."""
    if not run.residence.told:
        run.residence.told = True
        for line in remarks(run):
            run.event(line)
    _wake(run)
    _resume(run, frozenset({Memory.WEIGHTS}))


def shared_with_engine(run: Run) -> dict[str, dict[str, Tensor]]:
    """Return what an engine in this process may compute with, by component; note why others need a copy.

    Only beside adapters that are pushed as they are: merged weights would have to be written into the
    tensors that the trainer reads.
    """
    run.residence.copies = ()
    if run.engines is None or not run.engines.engine.capabilities().shares_weights:
        return {}
    modules = {name: one.module for name, one in run.components.items() if one.lora is not None}
    device = run.context.device
    reasons = {name: unshareable(module, device) for name, module in modules.items()}
    if modules and run.trainer.payload != "lora":
        reasons = dict.fromkeys(modules, "its adapters are merged by the trainer (sync.updater)")
    run.residence.copies = tuple(
        f"the engine holds its own copy of {name}'s weights: {why}"
        for name, why in reasons.items()
        if why
    )
    return {
        name: shared_tensors(module, device)
        for name, module in modules.items()
        if reasons[name] is None
    }


def remarks(run: Run) -> list[str]:
    """Say what an engine cannot share, and what stays on the device because it does."""
    lines = list(run.residence.copies)
    if not _shares(run) or run.context.device == "cpu":
        return lines
    kept = "the engine computes with the trainer's frozen weights, which stay on the device"
    if run.residence.engine_leaves:
        lines.append(
            f"cluster.offload_rollout: {kept}; adapted layers, text encoders and VAE leave it"
        )
    if run.residence.trainer_leaves:
        lines.append(f"cluster.offload_train: {kept}; adapters and optimizer state leave it")
    return lines


def _shares(run: Run) -> bool:
    """Say whether a running engine computes with the trainer's weights."""
    return run.engines is not None and any(
        handle.capabilities.shares_weights for handle in run.engines.handles()
    )


def _sleep(run: Run) -> None:
    if run.residence.trainer:
        with run.phases.phase("offload"):
            run.trainer.sleep(frozen=not _shares(run))
        run.residence.trainer = False


def _wake(run: Run) -> None:
    if not run.residence.trainer:
        with run.phases.phase("offload"):
            run.trainer.wake()
        run.residence.trainer = True


def _release(run: Run) -> None:
    """Release in the order opposite to that of ``_resume``."""
    assert run.engines is not None
    for what in (Memory.REST, Memory.WEIGHTS):
        if what in run.residence.engine:
            with run.phases.phase("offload"):
                run.engines.release(what)
            run.residence.engine -= {what}


def _resume(run: Run, wanted: frozenset[Memory]) -> None:
    """Resume weights first, then the rest, of what is not there yet."""
    assert run.engines is not None
    for what in (Memory.WEIGHTS, Memory.REST):
        if what in wanted - run.residence.engine:
            with run.phases.phase("offload"):
                run.engines.resume(what)
            run.residence.engine |= {what}
