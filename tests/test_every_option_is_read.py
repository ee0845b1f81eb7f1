"""An option that nothing reads is a lie: each core key must be read by a run, not only by the checks."""

from __future__ import annotations

import sys

import pytest
from e2e import run_here, write_recipe
from encoding_runs import image_rows
from third_party_plugins import installed

from drl.config.sections import SECTIONS
from drl_family_sd3.tiny import build_random

CHECKED_ONLY = {
    "rollout.use_router": "has one value; the other one is refused",
    "debug.dump_details": "sets two options that are read",
    "cluster.launcher": "picks the roles; there is one launcher",
    "model.family": "picks a component",
    "model.pipeline_config": "another spelling of model.family",
    "reward.type": "read through reward.all_terms",
    "reward.terms": "read through reward.all_terms",
    "algorithm.custom_needs": "read by custom_loss through its section",
    "data.metadata_key": "read by the data source through its section",
    "data.global_dataset": "picks the data source",
    "eval.config": "its sets become eval.datasets",
    "data.input_key": "read by the data source through its section",
}
"""Keys whose reading a run cannot show, and why."""

SFT = """
[run]
name = "sft"
[model]
checkpoint = "{checkpoint}"
[data]
source = "glyphs"
[data.glyphs]
count = 4
[sampling]
width = 48
height = 16
[rollout]
batch_size = 2
[algorithm]
loss = "sft_loss"
[train]
train_only = true
num_rollout = 1
micro_batch_size = 2
[checkpoint]
save_interval = 1
"""


@pytest.fixture
def reads(monkeypatch):
    """Record every field of a section that code outside drl.config and pydantic reads."""
    seen: set[str] = set()

    def watch(section: str, model: type) -> None:
        fields = set(model.model_fields)
        plain = model.__getattribute__

        def reading(self, name):
            if name in fields:
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if not caller.startswith(("drl.config", "pydantic")):
                    seen.add(f"{section}.{name}")
            return plain(self, name)

        monkeypatch.setattr(model, "__getattribute__", reading)

    for section, model in SECTIONS.items():
        watch(section, model)
    return seen


def test_a_run_reads_every_core_option(tmp_path, reads):
    checkpoint = tmp_path / "tiny-sd3"
    build_random(checkpoint, seed=0)
    recipe = write_recipe(tmp_path / "rl", checkpoint)
    with installed(tmp_path / "site", "acme-served"):
        run_here(
            recipe,
            tmp_path / "run",
            "rollout.engine=acme_served",
            "sde.type=sde",
            "algorithm.kl_beta=0.1",
            "algorithm.ref_mode=ema",
            "ema.enabled=true",
            "eval.rollout_sampler=true",
            f"debug.dump_details={tmp_path / 'dump'}",
        )
    run_here(
        recipe,
        tmp_path / "replayed",
        f"debug.load_rollout_data={tmp_path}/dump/rollout_data/{{rollout_id}}.safetensors",
        "debug.load_rollout_subsample=0.5",
        "sde.type=sde",
    )
    supervised = write_recipe(
        tmp_path / "sft", checkpoint, SFT.replace("num_rollout = 1", "num_epoch = 1")
    )
    run_here(supervised, tmp_path / "sft" / "run", "optimizer.name=sgd")
    photos = image_rows(tmp_path / "photos", 2)
    run_here(supervised, tmp_path / "photo-run", "data.source=jsonl", f"data.prompt_data={photos}")
    keys = {f"{name}.{field}" for name, model in SECTIONS.items() for field in model.model_fields}
    assert keys - reads - CHECKED_ONLY.keys() == set()
