"""What identifies the base model of an adapter, and what a checkpoint says about itself."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from drl.checkpoint import meta as module
from drl.checkpoint.meta import META, add_to_meta, base_model, check_base, read_meta
from drl.errors import CheckpointError


@pytest.fixture
def pipeline(tmp_path):
    component = tmp_path / "base" / "transformer"
    component.mkdir(parents=True)
    (component / "config.json").write_text('{"layers": 2}')
    (component / "weights.safetensors").write_bytes(os.urandom(3 * 65536 + 17))
    return tmp_path / "base"


def checkpoint(tmp_path, base, trained=10, every=100):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    facts = {"base": base, "trained_parameters": trained, "all_parameters": every}
    (folder / META).write_text(json.dumps(facts))
    return folder


def of(path):
    return base_model(str(path), ["transformer"])


def test_the_same_base_is_accepted(tmp_path, pipeline):
    check_base(checkpoint(tmp_path, of(pipeline)), of(pipeline))


def test_a_base_that_was_moved_is_the_same(tmp_path, pipeline):
    folder = checkpoint(tmp_path, of(pipeline))
    shutil.move(pipeline, tmp_path / "elsewhere")
    check_base(folder, of(tmp_path / "elsewhere"))


@pytest.mark.parametrize("change", ["config", "first", "last", "longer", "renamed"])
def test_other_weights_or_another_config_are_refused_with_both_names(tmp_path, pipeline, change):
    folder = checkpoint(tmp_path, of(pipeline))
    other = tmp_path / "other"
    shutil.copytree(pipeline, other)
    file = other / "transformer" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    if change == "config":
        (other / "transformer" / "config.json").write_text('{"layers": 3}')
    elif change == "longer":
        file.write_bytes(content + b"x")
    elif change == "renamed":
        file.rename(file.with_name("model.safetensors"))
    else:
        content[0 if change == "first" else -1] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match="trained on the base model") as caught:
        check_base(folder, of(other))
    assert str(pipeline) in str(caught.value)
    assert f"model.checkpoint = {other}" in str(caught.value)


def test_a_fine_tuning_differs_wherever_it_is_looked_at(tmp_path, pipeline, monkeypatch):
    """Large files are sampled; every sample of a fine-tuned model differs."""
    monkeypatch.setattr(module, "SAMPLE_BYTES", 64)
    before = of(pipeline)
    file = pipeline / "transformer" / "weights.safetensors"
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    assert of(pipeline) != before


def test_full_weights_need_no_base(tmp_path, pipeline):
    folder = checkpoint(tmp_path, of(pipeline), trained=100, every=100)
    check_base(folder, of(tmp_path / "nowhere"))


def test_what_is_no_local_folder_goes_by_its_name(tmp_path):
    folder = checkpoint(tmp_path, of("org/model"))
    assert of("org/model") == {"checkpoint": "org/model", "components": {}}
    check_base(folder, of("org/model"))
    with pytest.raises(CheckpointError, match=r"org/model; model\.checkpoint = org/other"):
        check_base(folder, of("org/other"))


def test_every_component_counts(tmp_path, pipeline):
    shutil.copytree(pipeline / "transformer", pipeline / "transformer_2")
    both = base_model(str(pipeline), ["transformer", "transformer_2"])
    assert set(both["components"]) == {"transformer", "transformer_2"}
    folder = checkpoint(tmp_path, both)
    (pipeline / "transformer_2" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        check_base(folder, base_model(str(pipeline), ["transformer", "transformer_2"]))


def test_facts_are_added_to_what_is_there(tmp_path):
    (tmp_path / META).write_text('{"iteration": 3, "time": "then"}')
    add_to_meta(tmp_path, {"base": {"checkpoint": "x"}, "time": "now"})
    assert read_meta(tmp_path) == {"iteration": 3, "time": "now", "base": {"checkpoint": "x"}}
