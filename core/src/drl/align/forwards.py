"""Changes of the trainer's forward: guidance, rows, mode, adapters, kernels, precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from drl.align.changes import Change, Finding, Scene, otherwise, verdict
from drl.align.measure import Around, Replay, RowsFigures, average, score, worst
from drl.deterministic import deterministic_compilation
from drl.lora import adapter_off, lora_layers, merge, unmerge
from drl.model.compiled import Compilations, compile_blocks
from drl.model.precision import OwnDtype
from drl.types import Condition, Conditions, Guidance, Need, Streams

if TYPE_CHECKING:
    from torch import nn

    from drl.interfaces.family import Family
    from drl.stages.loss import Forward

EVALUATION = "evaluation mode (no dropout)"

ROWS = (1, 2, 4, 8, 16)
"""Rows of a forward that are tried: the common micro-batch sizes."""

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Torch's attention kernels by the end of their diffusers names."""


def rows_of_a_forward(
    scene: Scene, still: Replay, table: Sequence[RowsFigures]
) -> Iterator[Finding]:
    """Yield what another number of rows leaves: other shapes of matrices take other kernels.

    ``table``: of the forward ``still``, which is without dropout; so is what it is compared with.
    """
    found = score(still, scene.batches)
    base = average(found), worst(found)
    have = {len(batch) for batch in scene.batches}
    for one in table:
        if have != {one.rows} and base[1] != 0.0:
            yield Finding(
                name=f"forwards of {one.rows} row{'s' if one.rows > 1 else ''}",
                meaning="rollout and training differ by the rows of a forward alone; bring "
                "train.micro_batch_size and the engine's rows (rollout.local.rows) together at "
                f"{one.rows}",
                verdict=verdict(base, (one.mean, one.max)),
                mean=one.mean,
                max=one.max,
                on_top_of=() if still is scene.replay else (EVALUATION,),
            )


def sizes(scene: Scene) -> list[int]:
    """Return the numbers of rows to try: the common ones, and the engine's own.

    Compiled blocks cost a compilation for each number, so then only those that are in use.
    """
    own = scene.engine_options.get("rows")
    used = {len(batch) for batch in scene.batches} | ({own} if isinstance(own, int) else set())
    return sorted(used if scene.compiled else {*ROWS, *used})


def mode(scene: Scene) -> Iterator[Change]:
    """Evaluation mode, as engines run models; the other changes are tried without dropout then."""
    change = otherwise(
        scene,
        EVALUATION,
        "dropout draws in the training forward and not in the engine's; set lora.dropout = 0, or accept a "
        "ratio that is not 1",
        replace(scene.replay, training=False),
    )
    yield replace(change, kept="helps")


def guidance(scene: Scene) -> Iterator[Change]:
    """Other ways to compute classifier-free guidance."""
    forward = scene.replay.forward
    if Need.GUIDANCE not in forward.loss.needs or not any(g.on for g in forward.guidance.values()):
        return
    family, batched = forward.family, forward.batched_guidance
    where = "in two forwards" if batched else "in one forward"
    meant = "one" if not batched else "two"
    yield _with_forward(
        scene,
        f"guidance {where}",
        f"the engine predicts with and without prompt in {meant} forward(s), the trainer does not; give "
        "both the same sampling.batched_guidance",
        replace(forward, batched_guidance=not batched),
    )
    yield _with_forward(
        scene,
        "guidance in one forward, negative rows first",
        "the engine puts the negative rows first in a joint forward, the trainer the positive ones",
        replace(forward, family=negative_first(family), batched_guidance=True),
    )
    for name, meaning, guide in FORMULAS:
        yield _with_forward(scene, name, meaning, replace(forward, family=guided_by(family, guide)))
    yield _with_forward(
        scene,
        "no guidance",
        "the engine samples without guidance although the recipe asks for it",
        replace(forward, guidance=dict.fromkeys(forward.guidance, Guidance())),
    )


Guide = Callable[["Family", Streams, Streams, Guidance], Streams]


def from_positive(family: Family, positive: Streams, negative: Streams, g: Guidance) -> Streams:
    """Return ``p + (g - 1)(p - u)``."""
    return {name: p + (g.effective - 1.0) * (p - negative[name]) for name, p in positive.items()}


def in_float32(family: Family, positive: Streams, negative: Streams, g: Guidance) -> Streams:
    """Return the family's guidance of predictions in float32."""
    up = [{name: v.float() for name, v in streams.items()} for streams in (positive, negative)]
    return family.guide(up[0], up[1], g)


def exchanged(family: Family, positive: Streams, negative: Streams, g: Guidance) -> Streams:
    """Return the family's guidance with the two predictions exchanged."""
    return family.guide(negative, positive, g)


FORMULAS: Sequence[tuple[str, str, Guide]] = (
    (
        "guidance from the positive prediction",
        "the engine guides by p + (g - 1)(p - u), the trainer by u + g (p - u): equal but for rounding; use "
        "one formula on both sides",
        from_positive,
    ),
    (
        "guidance in float32",
        "the engine combines the two predictions in float32, the trainer in the forward dtype",
        in_float32,
    ),
    (
        "prompt and negative prompt exchanged",
        "engine and trainer take prompt and negative prompt for each other",
        exchanged,
    ),
)


def guided_by(family: Family, guide: Guide) -> Family:
    """Return a family that guides otherwise and is the same in everything else."""
    twin = copy.copy(family)
    vars(twin)["guide"] = lambda positive, negative, g: guide(family, positive, negative, g)
    return twin


def negative_first(family: Family) -> Family:
    """Return a family whose joint forwards begin with the negative rows."""

    def joint(positive: Condition, negative: Condition | None, *, batched: bool) -> Conditions:
        both = None if negative is None else family.collate([negative, positive])
        return Conditions(positive=positive, negative=negative, joint=both)

    twin = guided_by(family, exchanged)  # its first half is the negative one
    vars(twin)["conditions"] = joint
    return twin


def adapters(scene: Scene) -> Iterator[Change]:
    """Adapters merged into the weights, as engines have them, or not there at all."""
    models = scene.replay.forward.models
    if not any(lora_layers(model) for model in models.values()):
        return
    yield _within(
        scene,
        "adapters merged into the weights",
        "the engine merges adapters into its weights, the trainer computes them beside; set "
        'rollout.local.adapters = "applied", or keep the difference',
        lambda: merged(models, lower=None),
    )
    yield _within(
        scene,
        "adapters merged in bf16",
        "the engine rounds the adapters' product to bf16 before it adds it to bf16 weights; it must add in "
        "float32 and round once",
        lambda: merged(models, lower=torch.bfloat16),
    )
    yield _within(
        scene,
        "without adapters",
        "the engine computes without the adapters: they never arrived, or it does not apply them",
        lambda: without_adapters(models),
    )


@contextmanager
def merged(models: Mapping[str, nn.Module], *, lower: torch.dtype | None) -> Iterator[None]:
    """Merge the active adapters, in float32 or all of it in a lower dtype; then as before, bit for bit."""
    try:
        for model in models.values():
            if lora_layers(model):
                merge(model)
                round_merged(model, lower)
        yield
    finally:
        for model in models.values():
            unmerge(model)


@torch.no_grad()
def round_merged(model: nn.Module, lower: torch.dtype | None) -> None:
    """Write the weights that a merge in a lower dtype gives over those of the right one."""
    for layer in lora_layers(model).values() if lower is not None else ():
        weight = layer.base_layer.get_parameter("weight")
        if "weight" in layer.pristine:
            base = layer.pristine["weight"]
            delta = (weight.float() - base.float()).to(lower)
            weight.copy_(base.to(lower) + delta)


@contextmanager
def without_adapters(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Compute as the base model."""
    with ExitStack() as stack:
        for model in models.values():
            if lora_layers(model):
                stack.enter_context(adapter_off(model))
        yield


def attention(scene: Scene) -> Iterator[Change | Finding]:
    """Each of torch's attention kernels. A compiled block keeps the one that it was compiled with."""
    if scene.compiled and scene.engine_options.get("compile") is True:
        yield Finding(
            name="attention kernels",
            meaning="compiled blocks keep the kernel that they were compiled with; to try others, set "
            "train.compile and rollout.local.compile to false",
            verdict="untried",
        )
        return
    for name, kernel in KERNELS.items():
        yield _within(
            scene,
            f"attention kernel {name}",
            f"the engine's attention is torch's {name} kernel, the trainer's is another; set "
            f'train.attention_backend = "_native_{name}" for both',
            lambda kernel=kernel: sdpa_kernel(kernel),  # type: ignore[misc]
        )


def precision(scene: Scene) -> Iterator[Change]:
    """The other forward dtypes. Compiled blocks would be compiled once more for a copy in float32."""
    forward = scene.replay.forward
    for dtype in ("fp32", "bf16"):
        if dtype == forward.dtype or (dtype == "fp32" and scene.compiled):
            continue
        other = replace(forward, dtype=dtype)
        if dtype == "fp32":
            with scene.replay.around():  # the copies are of the weights that the engine has
                models = {name: in_full(model) for name, model in forward.models.items()}
            other = replace(other, models=models)
        yield _with_forward(
            scene,
            f"forward in {dtype}",
            f"the engine computes in {dtype}, the trainer in {forward.dtype} (train.forward_dtype)",
            other,
        )


def in_full(model: nn.Module) -> nn.Module:
    """Return the model, or a copy all of whose modules hold and compute float32 where some do not."""
    tensors = [*model.parameters(), *model.buffers()]
    own = any(isinstance(module, OwnDtype) for module in model.modules())
    if not own and all(t.dtype == torch.float32 for t in tensors if t.is_floating_point()):
        return model
    twin = copy.deepcopy(model).float()
    for module in twin.modules():
        if isinstance(module, OwnDtype):
            module.__class__ = module.plain
    return twin


def eager_blocks(scene: Scene) -> Iterator[Change]:
    """The trainer's blocks as the engine has them, where only the trainer's are compiled."""
    if not scene.compiled or scene.engine_options.get("compile") is True:
        return
    change = _within(
        scene,
        "eager blocks",
        "the trainer's blocks are compiled and the engine's are not; set rollout.local.compile = true, or "
        "train.compile = false",
        lambda: torch.compiler.set_stance("force_eager"),
    )
    # whatever else there is: compared with the engine's own kind of blocks it is seen alone, and sooner
    yield replace(change, kept="always")


def compiled_blocks(scene: Scene) -> Iterator[Change]:
    """Compiled blocks where only the engine has them; the last change, as compiling cannot be undone."""
    if scene.compiled or scene.engine_options.get("compile") is not True or not scene.blocks:
        return
    yield _within(
        scene,
        "compiled blocks",
        "the engine's blocks are compiled and the trainer's are not; set train.compile = true, or "
        "rollout.local.compile = false",
        lambda: compiled(scene.replay.forward.models, scene.blocks),
    )


@contextmanager
def compiled(
    models: Mapping[str, nn.Module], blocks: Mapping[str, Sequence[str]]
) -> Iterator[None]:
    """Compile the blocks of every component."""
    with deterministic_compilation():
        for name, model in models.items():
            compile_blocks(model, blocks[name], Compilations("trainer"))
        yield


def _with_forward(scene: Scene, name: str, meaning: str, forward: Forward) -> Change:
    return otherwise(scene, name, meaning, replace(scene.replay, forward=forward))


def _within(scene: Scene, name: str, meaning: str, inner: Around) -> Change:
    outer = scene.replay.around

    def both() -> AbstractContextManager[object]:
        with ExitStack() as stack:
            stack.enter_context(outer())
            stack.enter_context(inner())
            return stack.pop_all()

    return otherwise(scene, name, meaning, replace(scene.replay, around=both))
