"""``drl align`` on the device: how far engine and trainer are apart, and what is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.facts import record

from drl.align.changes import causes_among
from drl.align.probe import Alignment, Wanted, probe
from drl.align.show import lines, write
from drl.catalog import Catalog

pytestmark = pytest.mark.gpu

GUIDED = "sampling.guidance_scale=4.5"


def aligned(recipe: Path, out: Path, *sets: str, random: bool = False) -> Alignment:
    wanted = Wanted(recipe=recipe, sets=sets, samples=8, random=random, out=out)
    found, directory = probe(wanted, Catalog.load())
    print("\n".join(lines(found)))
    assert len(write(found, directory.path)) == 3
    return found


@pytest.mark.parametrize("sets", [(), (GUIDED,)], ids=["plain", "guided"])
def test_float32_is_exactly_equal_at_equal_rows(
    recipe: Path, tmp_path: Path, fp32: tuple[str, ...], sets: tuple[str, ...]
) -> None:
    found = aligned(recipe, tmp_path / "out", *fp32, *sets)
    record("align fp32", **{"guided" if sets else "plain": found.max})
    assert found.exact


@pytest.mark.parametrize("sets", [(), (GUIDED,)], ids=["plain", "guided"])
def test_bf16_is_within_the_limit_and_its_steps_are_recorded(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...], sets: tuple[str, ...]
) -> None:
    found = aligned(recipe, tmp_path / "out", *bf16, *sets, random=True)
    steps = {f"step {one.step}": one.log_prob_mean for one in found.steps}
    causes = ", ".join(one.name for one in causes_among(found.findings))
    name = f"align bf16 {'guided' if sets else 'plain'}"
    record(name, mean=found.mean, max=found.max, causes=causes or "none", **steps)
    assert found.within


def test_the_rows_of_a_forward_are_tabled(
    recipe: Path, tmp_path: Path, bf16: tuple[str, ...]
) -> None:
    found = aligned(recipe, tmp_path / "out", *bf16, "train.micro_batch_size=2", random=True)
    spread = {str(one.rows): one.spread for one in found.rows}
    record("align rows of a forward bf16", **spread)
    assert set(spread) >= {"1", "2", "4", "8", "16"}
