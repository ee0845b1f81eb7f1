"""tools/recording_differences.py: which differences go into which cell, and the machine's description."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import folder, recorded

import recording_differences

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "0.5.17-fp32"


def worst(name: str) -> dict[str, float]:
    """Return the worst difference of each quantity of one recording."""
    found: dict[str, float] = {}
    for quantity, value in recording_differences.differences(*recorded(RELEASE, f"rollout-{name}")):
        found[quantity] = max(found.get(quantity, 0.0), value)
    return found


def test_a_guided_rollout_has_every_quantity_of_both_branches() -> None:
    found = worst("sde-k1-cfg-all")
    assert {"initial latents", "latents", "model_outputs", "log_probs"} <= found.keys()
    assert {"picture, closed loop", "picture, server's latents", "T5 embedding"} <= found.keys()
    assert found["initial latents"] == found["sigmas"] == found["timesteps"] == 0.0
    assert 0.0 <= found["model_outputs"] < 1e-4
    body, _ = recorded(RELEASE, "rollout-sde-k1-cfg-all")
    assert recording_differences.guided(body)


def test_kept_latents_that_begin_later_are_no_initial_latents() -> None:
    found = worst("sde-window-0-2")
    assert "latents" in found
    assert "initial latents" not in found
    assert "picture, server's latents" not in found


def test_cps_log_probs_are_compared_with_the_servers_constants() -> None:
    body, _ = recorded(RELEASE, "rollout-cps-k1-full")
    assert body["rollout_sde_type"] == "cps"
    assert not body["rollout_log_prob_no_const"]
    assert worst("cps-k1-full")["log_probs"] < 1e-5


def test_without_guidance_is_a_column_of_its_own() -> None:
    body, _ = recorded(RELEASE, "rollout-sde-k1-nocfg-all")
    assert not recording_differences.guided(body)
    assert recording_differences.guided(body | {"guidance_scale": 4.5})
    assert recording_differences.guided(body | {"true_cfg_scale": 2.0})


def test_the_table_shows_a_dash_where_nothing_was_compared() -> None:
    lines = recording_differences.lines_of(
        {
            "latents": {"without guidance": 1.2e-6, "with guidance": 0.0},
            "negatives": {"with guidance": 2e-7},
        }
    )
    assert [line.split() for line in lines[1:]] == [
        ["latents", "1.2e-06", "0.0e+00"],
        ["negatives", "-", "2.0e-07"],
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        ("model name\t: CPU 9\nflags\t\t: fpu avx2 sse4_2 avx512f amx_bf16\n", "CPU 9", "avx2 avx512f amx_bf16"),
        ("Features\t: fp asimd sve\n", "unknown", "asimd sve"),
        ("", "unknown", ""),
    ],
)  # fmt: skip
def test_the_processor_is_named_with_its_vector_instructions(
    tmp_path: Path, text: str, model: str, flags: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = recording_differences.processor(tmp_path / "cpuinfo")
    assert (found["model name"], found["vector flags"]) == (model, flags)


def call(golden: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "recording_differences.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"DRL_GOLDEN": str(golden), "OMP_NUM_THREADS": "1"},
    )


def test_without_recordings_it_says_so_and_where_it_looked(tmp_path: Path) -> None:
    finished = call(tmp_path)
    assert finished.returncode == 2
    assert str(tmp_path) in finished.stderr
    assert "DRL_GOLDEN" in finished.stderr
    assert finished.stdout == ""


@pytest.mark.slow
def test_as_a_script_it_prints_and_writes_the_table(tmp_path: Path) -> None:
    golden = folder(RELEASE).parents[1]
    finished = call(golden, str(tmp_path / "found.json"))
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "model name:" in finished.stdout
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["differences"]["sigmas"] == {"without guidance": 0.0, "with guidance": 0.0}
    assert set(written["processor"]) >= {"model name", "vector flags", "torch", "threads"}
