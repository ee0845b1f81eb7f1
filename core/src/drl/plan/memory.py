"""Bytes of a GPU by phase: what lies there all the time, and what the phase adds at its worst moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drl.plan.anatomy import Anatomy
    from drl.plan.ledger import Footprint
    from drl.plan.scenario import Scenario

ROLLOUT = "rollout"
TRAIN = "train"
SYNC = "update_weights"

COMPILED_SHARE = 0.76
"""Of what an eager forward reserves for its graph, compiled blocks need this much: 1.06 of 1.40 GiB, measured with
Stable Diffusion 3.5 Medium's shapes at 16 rows, adapters applied (docs/measurements.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes at the worst moment of one phase.

    ``weights``: of trainer, engine and pipeline. ``state``: gradients, optimizer, averages. ``data``: latents,
    conditions and pictures. ``activations``: what the forward and backward add. ``moment`` says which it is.
    ``graphs``: what recorded forwards keep for themselves beside that.
    """

    name: str
    moment: str
    weights: int
    state: int
    data: int
    activations: int
    workspace: int = 0
    graphs: int = 0

    @property
    def peak(self) -> int:
        """What the allocator counts as allocated; the memory of graphs is none of that, but reserved."""
        return self.weights + self.state + self.data + self.activations + self.workspace

    @property
    def room(self) -> int:
        """What a card must have."""
        return self.peak + self.graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a card adds to the arithmetic: the share of eager activations that it keeps, its workspace."""

    trained_share: float = 1.0
    workspace: int = 0


EXACT = Measured()


def phases_of(
    anatomy: Anatomy, scenario: Scenario, measured: Measured = EXACT
) -> tuple[PhaseMemory, ...]:
    """Return every phase of an iteration that uses the device, in the order of the iteration."""
    phases = [training(anatomy, scenario, measured)]
    if scenario.rollout:
        rollout = max(denoising(anatomy, scenario), decoding(anatomy, scenario), key=_room)
        phases = [rollout, *phases, pushing(anatomy, scenario)]
    return tuple(replace(one, workspace=measured.workspace) for one in phases)


def _room(phase: PhaseMemory) -> int:
    return phase.room


def denoising(anatomy: Anatomy, scenario: Scenario) -> PhaseMemory:
    """Return the engine's forwards; recorded ones have their activations in what their graphs keep."""
    activations = forward_activations(anatomy, scenario)
    return PhaseMemory(
        name=ROLLOUT,
        moment="denoising",
        weights=resting(anatomy, scenario, training=False),
        state=0 if scenario.offload_train else trained_state(anatomy, scenario),
        data=samples_kept(anatomy, scenario, training=False),
        activations=activations,
        graphs=max(0, kept_by_graphs(anatomy, scenario) - activations),
    )


def forward_activations(anatomy: Anatomy, scenario: Scenario) -> int:
    """Return what a forward adds."""
    return anatomy.inference.at(forward_rows(scenario)).peak


def forward_rows(scenario: Scenario) -> int:
    """Return the rows of a forward of the engine; both predictions of guidance share one where they are batched."""
    return scenario.engine_rows * (scenario.branches if scenario.batched else 1)


def kept_by_graphs(anatomy: Anatomy, scenario: Scenario, *, training: bool = False) -> int:
    """Return what recorded forwards keep, of which each uses the same."""
    if not has_graphs(scenario, training=training):
        return 0
    reserved = anatomy.recorded(forward_rows(scenario), applied=scenario.applied)
    return int(COMPILED_SHARE * reserved) if scenario.engine_compiled else reserved


def has_graphs(scenario: Scenario, *, training: bool) -> bool:
    """Say whether forwards are recorded at that time; an engine that leaves forgets them."""
    away = training and scenario.offload_rollout
    return scenario.graphs and scenario.rollout and not away


def decoding(anatomy: Anatomy, scenario: Scenario) -> PhaseMemory:
    """Return the decoding of one batch."""
    measured_rows = anatomy.outline.decode_rows
    return PhaseMemory(
        name=ROLLOUT,
        moment="decoding",
        weights=resting(anatomy, scenario, training=False),
        state=0 if scenario.offload_train else trained_state(anatomy, scenario),
        data=samples_kept(anatomy, scenario, training=False),
        activations=anatomy.decoding.peak * scenario.decode_rows // measured_rows,
        graphs=kept_by_graphs(anatomy, scenario),
    )


def training(anatomy: Anatomy, scenario: Scenario, measured: Measured) -> PhaseMemory:
    """Return the largest micro-batch: its backward, or a pass without gradient after its forward."""
    rows = scenario.rows * scenario.rows_per_pair * scenario.trained_branches
    window = 2 * scenario.micro_batches * scenario.rows * anatomy.row_bytes
    return PhaseMemory(
        name=TRAIN,
        moment="backward",
        weights=resting(anatomy, scenario, training=True),
        state=trained_state(anatomy, scenario) + gradients(anatomy, scenario),
        data=samples_kept(anatomy, scenario, training=True) + window,
        activations=activations(anatomy, scenario, rows, measured.trained_share),
        graphs=kept_by_graphs(anatomy, scenario, training=True),
    )


def activations(anatomy: Anatomy, scenario: Scenario, rows: int, share: float) -> int:
    """Return what a micro-batch of so many rows adds at its worst moment.

    Compiled blocks keep a measured ``share`` of what eager mode keeps inside a block; the inputs of blocks
    that are recomputed stay whole.
    """
    found: Footprint = anatomy.training(scenario.checkpointed).at(rows)
    inputs = 0.0
    if scenario.checkpointed and share != 1.0:
        inputs = scenario.checkpointed * anatomy.training(1.0).at(rows).kept
    peak = inputs + share * (found.peak - inputs)
    if scenario.extra_passes:
        kept = inputs + share * (found.kept - inputs)
        peak = max(peak, kept + anatomy.inference.at(rows).peak)
    return int(peak)


def pushing(anatomy: Anatomy, scenario: Scenario) -> PhaseMemory:
    """Return a push: merged layers are made before any is written, and the whole model is compared after.

    Gradients and the rollout are still there, and the engine has copies of the adapters until the end.
    """
    made = copies = 0
    if scenario.adapters:
        copies = int(anatomy.bytes.trained * scenario.rank_factor)
        made = 0 if scenario.applied else anatomy.bytes.adapted * engine_size(scenario)
    return PhaseMemory(
        name=SYNC,
        moment="push",
        weights=resting(anatomy, scenario, training=True, pushing=True),
        state=trained_state(anatomy, scenario) + gradients(anatomy, scenario),
        data=samples_kept(anatomy, scenario, training=True),
        activations=copies + max(made, anatomy.bytes.compared),
        graphs=kept_by_graphs(anatomy, scenario, training=True),
    )


def resting(anatomy: Anatomy, scenario: Scenario, *, training: bool, pushing: bool = False) -> int:
    """Return the weights that lie on the device: of the trainer, of the engine, of the pipeline's parts."""
    trainer = trainer_weights(anatomy, scenario)
    if scenario.offload_train and not training:
        # what the engine computes with cannot leave
        trainer = anatomy.bytes.frozen if scenario.own_weights == "shared" else 0
    away = scenario.offload_rollout and training
    engine = 0 if away and not pushing else engine_weights(anatomy, scenario)
    return trainer + engine + (0 if away else parts(anatomy, scenario))


def trainer_weights(anatomy: Anatomy, scenario: Scenario) -> int:
    """Return the bytes of the trainer's parameters and buffers on one device."""
    held = anatomy.bytes
    if scenario.cpu_offload:
        return held.buffers
    trained = int(held.trained * scenario.rank_factor)
    return (held.frozen + trained) // scenario.shards + held.buffers


def engine_weights(anatomy: Anatomy, scenario: Scenario) -> int:
    """Return the bytes of the engine's own weights.

    Shared: what is merged is written into copies of the adapted layers. A copy of its own keeps the adapted
    layers twice, merged and as they were.
    """
    if not scenario.rollout:
        return 0
    held, size = anatomy.bytes, engine_size(scenario)
    own = 0 if scenario.own_weights == "shared" else held.elements * size + held.buffers
    if not scenario.adapters:
        return own
    if scenario.applied:
        return own + int(held.trained_elements * scenario.rank_factor) * scenario.forward_size
    return own + held.adapted * size


def engine_size(scenario: Scenario) -> int:
    """Return the bytes of one number of the engine's weights."""
    return 4 if scenario.own_weights == "fp32" else scenario.forward_size


def parts(anatomy: Anatomy, scenario: Scenario) -> int:
    """Return the bytes of text encoders, VAE and the like that stay on the device."""
    if not scenario.rollout:
        return 0
    return sum(
        part.weight_bytes for part in anatomy.outline.parts if part.name not in scenario.released
    )


def gradients(anatomy: Anatomy, scenario: Scenario) -> int:
    """Return the bytes of the gradients of what is trained."""
    if scenario.cpu_offload:
        return 0
    return int(anatomy.bytes.trained * scenario.rank_factor) // scenario.shards


def trained_state(anatomy: Anatomy, scenario: Scenario) -> int:
    """Return the bytes of the optimizer's state, in the weights' dtype, and of float32 copies of the weights."""
    if scenario.cpu_offload:
        return 0
    held = anatomy.bytes
    size = held.trained / max(held.trained_elements, 1)
    numbers = held.trained_elements * scenario.rank_factor
    state = numbers * (scenario.optimizer_states * size + 4 * scenario.copies)
    return int(state) // scenario.shards


def samples_kept(anatomy: Anatomy, scenario: Scenario, *, training: bool) -> int:
    """Return the bytes of a rollout's latents and conditions, which stay on the device until it is trained on.

    Recorded forwards read their inputs from copies.
    """
    if not scenario.rollout:
        return 0
    latents = scenario.samples * (scenario.num_steps + 1) * anatomy.row_bytes
    copied = 0
    if has_graphs(scenario, training=training):
        conditions = scenario.engine_rows * scenario.branches
        copied = conditions * anatomy.condition_bytes + scenario.engine_rows * anatomy.row_bytes
    return latents + (scenario.prompts + 1) * anatomy.condition_bytes + copied
