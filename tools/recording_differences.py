#!/usr/bin/env python3
"""Print how far the embedded engine is from recordings of the real server, on this machine's processor.

Worst absolute difference per quantity, over the rollouts without guidance and over those with it. The
last bits of a matrix product depend on the processor, so the first lines name it. Recordings come from
``$DRL_GOLDEN``; exit code 2 where there are none.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from recordings import distance, engine_of, made, our_request, picture, recorded  # noqa: E402
from test_sglang_recordings import (  # noqa: E402
    LATER,
    RELEASES,
    ROLLOUTS,
    kept,
    returned,
    with_constants,
)

from drl.api import ConditionRecord, Sample  # noqa: E402

PLAIN, GUIDED = "without guidance", "with guidance"
CLIP_TOKENS = 77
VECTOR_FLAGS = ("avx", "amx", "fma", "sve", "asimd", "neon")
Table = dict[str, dict[str, float]]


def main() -> int:
    """Print the processor and the table; with one argument, write both as JSON into that file."""
    try:
        found = table()
    except pytest.skip.Exception as missing:
        print(missing, file=sys.stderr)
        return 2
    machine = processor(Path("/proc/cpuinfo"))
    for name, value in machine.items():
        print(f"{name}: {value}")
    print("\n".join(lines_of(found)))
    if len(sys.argv) > 1:
        content = {"processor": machine, "differences": found}
        Path(sys.argv[1]).write_text(json.dumps(content, indent=2) + "\n")
    return 0


def processor(cpuinfo: Path) -> dict[str, str]:
    """Return what decides the last bits: model, vector instructions, libraries, threads."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    pairs = (line.partition(":") for line in lines)
    entries = {key.strip(): value.strip() for key, _, value in pairs}
    flags = entries.get("flags", entries.get("Features", "")).split()
    return {
        "model name": entries.get("model name", "unknown"),
        "vector flags": " ".join(flag for flag in flags if flag.startswith(VECTOR_FLAGS)),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "MKL, oneDNN": f"{torch.backends.mkl.is_available()}, {torch.backends.mkldnn.is_available()}",
        "threads": f"{torch.get_num_threads()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}",
    }


def table() -> Table:
    """Return the worst difference by quantity, then by guidance."""
    worst: Table = defaultdict(dict)
    exchanges = [(RELEASES[0], name) for name in ROLLOUTS] + [(RELEASES[1], n) for n in LATER]
    for release, name in exchanges:
        body, reply = recorded(release, f"rollout-{name}")
        column = GUIDED if guided(body) else PLAIN
        for quantity, difference in differences(body, reply):
            worst[quantity][column] = max(worst[quantity].get(column, 0.0), difference)
    return dict(worst)


def guided(body: Mapping[str, Any]) -> bool:
    """True when the server combined two predictions."""
    scale: float = max(body["guidance_scale"], body.get("true_cfg_scale") or 0.0)
    return scale > 1


def differences(body: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield quantity and difference for what both the server and the engine kept."""
    sample = made(body)
    ours, theirs = kept(sample), returned(reply)
    latents = theirs.get("latents")
    whole = latents is not None and len(latents) == body["num_inference_steps"] + 1
    if latents is not None and whole:
        yield "initial latents", distance(ours["latents"][:1], latents[:1])
    for name, tensor in theirs.items():
        yield name, distance(ours[name], tensor)
    yield "log_probs", distance(log_probs(body, sample), reply["rollout_log_probs"])
    yield "picture, closed loop", distance(picture(sample), reply["generated_output"])
    conditions = reply.get("denoising_env") or {}
    yield from embeddings(sample.condition, conditions.get("pos_cond_kwargs"))
    yield from embeddings(sample.negative, conditions.get("neg_cond_kwargs"))
    if latents is not None and whole:
        sampler = engine_of(our_request(body)).sampler
        assert sampler is not None
        (media,) = sampler.pipeline.decode({"visual": latents[-1:]})
        decoded = distance(media.pixels[:, 0], reply["generated_output"])
        yield "picture, server's latents", decoded


def log_probs(body: Mapping[str, Any], sample: Sample) -> Tensor:
    """Return the engine's log-probs as the server defines them; its CPS may have the constants."""
    trajectory = sample.trajectory
    assert trajectory is not None
    if body["rollout_sde_type"] != "cps" or body["rollout_log_prob_no_const"]:
        return trajectory.log_probs
    stds = trajectory.debug["noise_std_devs"]
    full: Tensor = with_constants(trajectory.log_probs, stds, trajectory.sde_steps)
    return full


def embeddings(
    record: ConditionRecord | None, theirs: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, float]]:
    """Yield the differences of the text embeddings, where the reply holds them."""
    if theirs is None or record is None:
        return
    text, pooled = "encoder_hidden_states", "pooled_projections"
    yield "pooled embedding", distance(record.tensors[pooled], theirs[pooled])
    ours, sequence = record.tensors[text], theirs[text]
    yield "CLIP embedding", distance(ours[:CLIP_TOKENS], sequence[:CLIP_TOKENS])
    yield "T5 embedding", distance(ours[CLIP_TOKENS:], sequence[CLIP_TOKENS:])


def lines_of(found: Table) -> list[str]:
    """Return the table's lines."""
    head = f"{'worst absolute difference':<28}{PLAIN:>18}{GUIDED:>18}"
    columns = (PLAIN, GUIDED)
    return [
        head,
        *(
            f"{quantity:<28}" + "".join(f"{shown(row.get(name)):>18}" for name in columns)
            for quantity, row in found.items()
        ),
    ]


def shown(value: float | None) -> str:
    """Return a difference with two digits; a dash where nothing was compared."""
    return "-" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
