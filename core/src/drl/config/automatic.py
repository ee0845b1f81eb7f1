"""Values that follow from the machine or from other options; their origin is "auto".

Only a value that nobody gave is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drl.config.adapter_file import adapter_directories, options_of_adapter
from drl.config.batch import batch_knobs
from drl.config.draft import Draft, NotKnown
from drl.config.layers import AUTO
from drl.errors import BatchError


def fact(draft: Draft, kind: str, path: str, name: str, default: Any) -> Any:
    """Return one fact of the component that the option at ``path`` picks; NotKnown without a pick."""
    return draft.facts(kind, path).get(name, default)


def needs(draft: Draft, need: str) -> bool:
    """True when the loss needs something; NotKnown when the loss itself is not known."""
    option = fact(draft, "loss", "algorithm.loss", "needs_option", None)
    if option is not None:
        return need in draft.get(option)
    return need in fact(draft, "loss", "algorithm.loss", "needs", ())


def resolve_automatic(draft: Draft) -> None:
    """Set every option that follows from others, in an order in which each finds what it needs."""
    for path, value_of in _AUTOMATIC.items():
        if draft.given(path) and draft.get_or_none(path) != "auto":
            continue
        try:
            value = value_of(draft)
        except NotKnown:
            continue
        if value is not None and value != draft.get_or_none(path):
            draft.put(path, value, AUTO)
    draft.run(_resolve_replay)
    draft.run(_resolve_batch)
    draft.run(_resolve_adapter)


def _run_name(draft: Draft) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", draft.stem).strip("-._")
    return name[:100] or "run"


def _device(draft: Draft) -> str:
    return "cuda" if draft.machine.cuda else "cpu"


def _forward_dtype(draft: Draft) -> str | None:
    return "fp32" if draft.get("cluster.device") == "cpu" else None


def _generator_device(draft: Draft) -> str | None:
    return "cuda" if draft.get("cluster.device").startswith("cuda") else "cpu"


def _batched_guidance(draft: Draft) -> bool:
    # on a CPU one forward of 2B rows is no faster than two of B, and another product of matrices
    return bool(draft.get("cluster.device").startswith("cuda"))


def _parity_limit(draft: Draft) -> float:
    return 1e-5 if draft.get("train.forward_dtype") == "fp32" else 2e-3


def _reference(draft: Draft) -> str:
    if draft.get("algorithm.kl_beta") > 0 and needs(draft, "rollout"):
        return "lora_base"
    if needs(draft, "reference") and draft.get("lora.enabled"):
        return "lora_base"
    average = needs(draft, "old_prediction") or needs(draft, "reference")
    return "ema" if average and draft.get("ema.enabled") else "none"


def _without_constants(draft: Draft) -> bool | None:
    only = fact(draft, "sde_backend", "sde.type", "log_prob_no_const", False)
    return True if only else None


def _dumped(draft: Draft, folder: str, name: str) -> Path | None:
    root = draft.get("debug.dump_details")
    return None if root is None else root / folder / f"{name}.safetensors"


def _served(value: Any) -> Callable[[Draft], Any]:
    """Return what gives an option this value where the engine is a server; elsewhere it stays unset."""
    return lambda draft: value if fact(draft, "engine", "rollout.engine", "served", False) else None


_AUTOMATIC: dict[str, Callable[[Draft], Any]] = {
    "run.name": _run_name,
    "cluster.device": _device,
    "train.forward_dtype": _forward_dtype,
    "sampling.generator_device": _generator_device,
    "sampling.batched_guidance": _batched_guidance,
    "trust.max_log_prob_diff": _parity_limit,
    "rollout.seed": lambda draft: draft.get("train.seed"),
    "rollout.use_router": _served(True),
    "rollout.router_failure_threshold": _served(3),
    "rollout.distributed_post": _served(False),
    "rollout.parser_num_workers": _served(1),
    "eval.num_steps": lambda draft: draft.get("sampling.num_steps"),
    "eval.input_key": lambda draft: draft.get("data.input_key"),
    "eval.reward_key": lambda draft: draft.get("reward.key"),
    "algorithm.ref_mode": _reference,
    "sde.log_prob_no_const": _without_constants,
    "debug.save_rollout_data": lambda draft: _dumped(draft, "rollout_data", "{rollout_id}"),
    "debug.save_train_data": lambda draft: _dumped(draft, "train_data", "{rollout_id}_{rank}"),
    "lora.rank": lambda draft: draft.get("lora.r"),
    "lora.alpha": lambda draft: draft.get("lora.lora_alpha"),
    "lora.target_modules": lambda draft: draft.get("lora.lora_modules"),
}


def _resolve_adapter(draft: Draft) -> None:
    """Take what the adapter that the run starts from says of itself."""
    path = draft.get("lora.adapter_path")
    if path is None:
        return
    first = next(iter(adapter_directories(path, draft.get("model.components")).values()))
    for key, value in options_of_adapter(first).items():
        if not draft.given(f"lora.{key}"):
            draft.put(f"lora.{key}", value, AUTO)


def _resolve_replay(draft: Draft) -> None:
    """A replay runs without engines by itself; ``train_only`` is left for losses without rollouts."""
    replayed = draft.get("debug.load_rollout_data") is not None
    if replayed and draft.get("train.train_only") and needs(draft, "rollout"):
        draft.put("train.train_only", False, AUTO)


def _resolve_batch(draft: Draft) -> None:
    """Derive the two batch knobs, and the length of the schedule from them."""
    samples = draft.get("rollout.batch_size") * draft.get("rollout.n_samples_per_prompt")
    size, count = "train.global_batch_size", "train.num_steps_per_rollout"
    try:
        per_step, steps = batch_knobs(samples, draft.get(size), draft.get(count))
    except BatchError as error:
        draft.error(size if draft.given(size) else count, str(error))
        return
    for path, value in ((size, per_step), (count, steps)):
        if draft.get(path) is None:
            draft.put(path, value, AUTO)
    rollouts = draft.get("train.num_rollout")
    if draft.get("optimizer.lr_decay_iters") is None and rollouts:
        draft.put("optimizer.lr_decay_iters", rollouts * steps, AUTO)
