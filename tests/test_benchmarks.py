"""benchmarks/ at a small size on a CPU: each script as a process of its own, and what their tables rest on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402
import fsdp_profile  # noqa: E402
import fsdp_step  # noqa: E402
from fsdp_variants import VARIANTS, Variant  # noqa: E402

Rows = list[dict[str, Any]]


Run = Callable[..., tuple[str, Rows]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script in this process at the small size; gives what it printed and the rows it wrote."""

    def call(script: str, *arguments: str) -> tuple[str, Rows]:
        monkeypatch.setattr(sys, "argv", command(script, tmp_path, *arguments)[1:])
        importlib.import_module(script).main()
        return capsys.readouterr().out, rows_of(script, tmp_path)

    return call


def command(script: str, out: Path, *arguments: str) -> list[str]:
    """Return the words that run a script."""
    file = str(ROOT / "benchmarks" / f"{script}.py")
    where = ("--size", "small", "--device", "cpu", "--out", str(out))
    return [sys.executable, file, *where, *arguments]


def rows_of(script: str, out: Path) -> Rows:
    """Return the rows that a script wrote, with where they were measured."""
    (file,) = out.glob(f"{script}*.json")
    content = json.loads(file.read_text())
    assert content["size"] == "small"
    assert content["machine"]["torch"] == torch.__version__
    rows: Rows = content["rows"]
    return rows


def by(rows: Rows, key: str) -> dict[str, dict[str, Any]]:
    """Return the rows by the value of their first column."""
    return {row[key]: row for row in rows}


def test_adapters_are_compared_with_the_base_in_the_same_arithmetic(run: Run) -> None:
    printed, rows = run("lora_forward", "--eager", "--repeats", "3", "--warmup", "1")
    figures = by(rows, "figure")
    for what in ("forward", "forward+backward"):
        times, ratios = figures[f"{what} eager ms"], figures[f"{what} eager ratio"]
        assert ratios["base, bf16"] == ratios["base, autocast"] == 1.0
        for case, base in (
            ("float32 adapters, autocast", "base, autocast"),
            ("bf16 adapters, bf16", "base, bf16"),
        ):
            assert ratios[case] == pytest.approx(times[case] / times[base])
        assert f"{what} eager ratio" in printed
    assert not any("compiled" in figure for figure in figures)


@pytest.mark.slow
def test_compiled_blocks_are_measured_too(run: Run) -> None:
    _, rows = run("lora_forward", "--repeats", "2", "--warmup", "1")
    figures = by(rows, "figure")
    assert figures["forward compiled ms"]["float32 adapters, autocast"] > 0
    assert figures["forward compiled ms"]["base, bf16"] is None
    assert figures["forward+backward compiled ratio"]["base, autocast"] == 1.0


def check_steps(printed: str, rows: Rows, out: Path) -> None:
    """Gradients agree, ratios are those of the printed times, and each variant has its profile."""
    found = by(rows, "variant")
    assert not any("refused" in row for row in rows)
    for name, row in found.items():
        first = found[f"{name.partition(':')[0]}: unwrapped"]
        assert row["gradient"] == pytest.approx(first["gradient"], rel=0.02), name
        assert row["ratio"] == pytest.approx(row["step ms"] / first["step ms"])
        assert row["step ms"] > row["forward ms"] > 0
    profile = (out / "fsdp_step_1_profile.txt").read_text()
    profiled = {variant.name for variant in VARIANTS if variant.profile} & found.keys()
    assert len(profiled) >= 2
    assert all((f"== {name}\n" in profile) == (name in profiled) for name in found)
    assert "aten::" in profile
    assert printed.splitlines()[1].split()[:3] == ["variant", "step", "ms"]


def test_sharded_steps_compute_the_gradient_of_the_unwrapped_one(run: Run, tmp_path: Path) -> None:
    only = "^(adapters|full): (unwrapped|naive, fused AdamW|drl(, sharded)?)$"
    arguments = ("--repeats", "1", "--warmup", "0", "--only", only)
    printed, rows = run("fsdp_step", *arguments)
    assert len(rows) == 6
    check_steps(printed, rows, tmp_path)


@pytest.mark.slow
def test_so_does_every_variant(run: Run, tmp_path: Path) -> None:
    printed, rows = run("fsdp_step", "--repeats", "1", "--warmup", "0")
    assert [row["variant"] for row in rows] == [variant.name for variant in VARIANTS]
    check_steps(printed, rows, tmp_path)


@pytest.mark.slow
def test_two_ranks_sum_in_drl_and_average_in_a_plain_wrap(tmp_path: Path) -> None:
    only = "^adapters: (mixed dtypes, no policy|drl, sharded|drl, whole)$"
    arguments = ("--repeats", "1", "--warmup", "0", "--no-profile", "--only", only)
    finished = subprocess.run(
        command("fsdp_step", tmp_path, "--world", "2", *arguments),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = by(rows_of("fsdp_step", tmp_path), "variant")
    average = found["adapters: mixed dtypes, no policy"]["gradient"]
    for name in ("adapters: drl, sharded", "adapters: drl, whole"):
        assert found[name]["gradient"] == pytest.approx(2 * average, rel=0.02)


def test_a_checkpoint_is_saved_both_ways_and_loaded(run: Run) -> None:
    printed, rows = run("checkpoint_save")
    figures = by(rows, "figure")
    model = common.transformer(common.SCALES["small"], "meta", torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    # float32 weights and two moments, and a few hundred bytes a tensor around them
    assert figures["GiB"]["full"] * common.GIB == pytest.approx(12 * parameters, rel=0.5)
    assert figures["GiB"]["adapters"] < figures["GiB"]["full"]
    for kind in ("adapters", "full"):
        block, whole = figures["later block s"][kind], figures["sync s"][kind]
        assert figures["later block / sync"][kind] == pytest.approx(block / whole)
        assert figures["later background s"][kind] >= block > 0
        assert figures["load s"][kind] > 0
        assert figures["iteration save s"][kind] >= figures["iteration block s"][kind]
    assert "later block / sync" in printed


def check_push(row: dict[str, Any]) -> None:
    """A push and its parts were timed, and whoever left came back; which takes longer is no test's business."""
    parts = ("sync", "fingerprint", "digest", "sleep", "wake", "release", "resume")
    assert all(row[f"{part} ms"] > 0 for part in parts)


def test_a_push_is_measured_beside_its_parts(run: Run) -> None:
    printed, rows = run("sync", "--repeats", "2", "--warmup", "1", "--only", "shared, merged")
    (row,) = rows
    check_push(row)
    assert "fingerprint ms" in printed


@pytest.mark.slow
def test_shared_weights_leave_the_engine_little_of_its_own(run: Run) -> None:
    _, rows = run("sync", "--repeats", "2", "--warmup", "1")
    own = {name: row["engine's own GiB"] for name, row in by(rows, "engine").items()}
    assert own["shared, applied"] < own["shared, merged"] < own["bf16 copy, merged"]
    assert own["bf16 copy, merged"] < own["fp32 copy, merged"]
    for row in rows:
        check_push(row)


def test_an_adapter_is_read_in_every_format_and_merged(run: Run) -> None:
    _, rows = run("adapter_load", "--repeats", "1")
    found = by(rows, "what")
    for name in ("PEFT folder", "diffusers file"):
        assert found[name]["MB"] == pytest.approx(1.0, rel=0.1)
    # queries, keys and values are one layer there, of three times the rank
    assert 1.0 < found["kohya file"]["MB"] < 2.5
    for name in ("PEFT folder", "diffusers file", "kohya file"):
        assert found[name]["read s"] > 0
        assert found[name]["show s"] > 0
    for name in ("load into the model", "merge, streaming", "merge and unmerge in place"):
        assert found[name]["seconds"] > 0


def test_what_torch_refuses_is_a_row_and_costs_no_other_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh: Any = None  # the refusal comes before the mesh is asked for
    options = Namespace(
        device="cpu", size="small", world=1, repeats=1, warmup=0, no_profile=True, out=None
    )
    bad = Variant(name="adapters: whole numbers", wrap="none", base=torch.int8)
    rows = fsdp_step.measured([bad], options, mesh)
    assert rows[0]["variant"] == bad.name
    assert "int8" in rows[0]["refused"].lower() or "Error" in rows[0]["refused"]
    assert fsdp_step.columns_of(rows) == [["variant", "refused"]]
    assert bad.name in capsys.readouterr().err


def interval(name: str, start: float, end: float) -> fsdp_profile.Interval:
    return fsdp_profile.Interval(name, start, end)


def test_busy_time_is_the_union_and_idle_what_is_left() -> None:
    kernels = [
        interval("nvjet_hsh_128x256", 0.0, 2.0),
        interval("ncclDevKernel_AllGather_RING_LL", 1.0, 4.0),  # another stream, half beside it
        interval("ncclDevKernel_AllGather_RING_LL", 1.5, 2.5),
        interval("void at::native::unrolled_elementwise_kernel", 7.0, 8.0),
    ]
    profile = fsdp_profile.summary(kernels, "")
    assert profile.busy == 5.0
    assert profile.idle == 3.0
    assert profile.kinds["collective"] == 4.0
    assert profile.kinds["matmul"] == 2.0
    assert profile.kinds["other"] == 1.0
    assert fsdp_profile.summary([], "").busy == 0.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "collective"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::vectorized_layer_norm_kernel", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    assert fsdp_profile.kind_of(name) == kind


def test_a_profile_of_a_cpu_lists_operators() -> None:
    profile = fsdp_profile.profiled(lambda: torch.ones(4).add_(1).sum(), "cpu")
    assert "aten::add_" in profile.text
    assert profile.busy == profile.idle == 0.0


def test_a_round_runs_every_work_once() -> None:
    called: list[str] = []
    works = {name: lambda name=name: called.append(name) for name in ("a", "b")}
    times = common.in_rounds(works, "cpu", repeats=2, warmup=1)
    assert called == ["a", "b"] * 3
    assert list(times) == ["a", "b"]
    assert all(took >= 0 for took in times.values())


def test_a_table_lines_up_and_leaves_out_rows_without_its_columns() -> None:
    rows: Rows = [
        {"what": "first", "ms": 12.3456, "ratio": 1.0},
        {"what": "a longer name", "ms": 12345.6},
        {"what": "refused", "why": "no"},
    ]
    assert common.table(rows, ["what", "ms", "ratio"]).splitlines() == [
        "what              ms  ratio",
        "first           12.3      1",
        "a longer name  12346      -",
    ]
    assert common.table(rows).splitlines()[-1].split() == ["refused", "-", "-", "no"]


def test_models_of_one_seed_are_equal_and_keep_their_position_table() -> None:
    scale = common.SCALES["small"]
    one, other = (common.transformer(scale, "cpu", torch.bfloat16) for _ in range(2))
    ours, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours["pos_embed.pos_embed"].dtype == torch.float32
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    first = common.inputs(scale, "cpu", torch.bfloat16, seed=1)
    assert torch.equal(
        first["hidden_states"], common.inputs(scale, "cpu", torch.bfloat16)["hidden_states"]
    )
    assert not torch.equal(
        first["hidden_states"], common.inputs(scale, "cpu", torch.bfloat16, seed=2)["hidden_states"]
    )


def test_a_rollout_is_timed_beside_diffusers_and_the_transformer_alone(run: Run) -> None:
    printed, rows = run("rollout", "--eager", "--repeats", "1", "--warmup", "0", "--steps", "2")
    ways = {row["way"]: row for row in rows}
    assert list(ways) == ["transformer alone", "product", "diffusers, eager"]
    assert all(name in printed for name in ways)
    for row in rows:
        assert row["pictures"] == 2
        assert row["pictures/s"] == pytest.approx(2 / row["seconds"])
    alone, product = ways["transformer alone"], ways["product"]
    share = alone["seconds"] / product["seconds"]
    assert product["share of the transformer alone"] == pytest.approx(share)
