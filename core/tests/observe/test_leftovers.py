"""What a killed process was in the middle of is gone once its directory is opened again."""

from __future__ import annotations

import pytest

from drl.observe.directory import RunDirectory, clear_leftovers

LEFT = [
    ".lock.json.0123456789ab.partial",
    "evaluations/.after.json.0123456789ab.partial",
    "samples/after/.samples.json.0123456789ab.partial",
    "adapter/.transformer.new-0123456789ab/adapter_config.json",
    ".adapter.new-0123456789ab/adapter_model.safetensors",
    ".adapter.old-0123456789ab/adapter_model.safetensors",
]
STAYS = [
    "lock",
    "adapter/adapter_config.json",
    "samples/.hidden",
    ".adapter.new-of-the-user/file",
    ".notes.partial-view",
    "checkpoints/iter_0000001/model/.metadata",
    "evaluations/after.json",
]


@pytest.fixture
def folder(tmp_path):
    for name in [*LEFT, *STAYS]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def names(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_only_what_is_being_replaced_goes(folder):
    clear_leftovers(folder)
    assert names(folder) == sorted(STAYS)
    clear_leftovers(folder)
    assert names(folder) == sorted(STAYS)


def test_the_one_who_holds_the_lock_clears_and_nobody_else_does(folder):
    RunDirectory.open(folder)
    assert set(LEFT) < set(names(folder))
    with RunDirectory.open(folder):
        assert not set(LEFT) & set(names(folder))


def test_a_folder_reached_by_a_link_is_not_walked_into(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / ".a.json.0123456789ab.partial").write_text("of another run")
    (folder / "linked").symlink_to(elsewhere)
    clear_leftovers(folder)
    assert (elsewhere / ".a.json.0123456789ab.partial").exists()
