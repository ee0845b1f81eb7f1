"""Files whose bytes follow from their content, whichever process writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drl.lora.tensor_file import save_tensors

TENSORS = {"b.weight": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor([7], dtype=torch.int8)}
METADATA = {
    "zeta": '{"alpha": 3,\n\t"ü→漢😀": "\\\\ \\" / \x01 \x1f \x7f \u2028"}',
    "alpha": "",
    'key "q"': "q",
    "middle": "m" * 300,
}

WRITE = """
import sys
from pathlib import Path
import torch
from drl.lora.tensor_file import save_tensors
save_tensors(Path(sys.argv[1]), {"a": torch.zeros(3)}, {name: name for name in "hgfedcba"})
"""


def test_what_was_written_is_read_back_with_its_metadata_in_order(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_tensors(file, TENSORS, METADATA)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", **METADATA}
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    places = [file.read_bytes().index(name) for name in (b"alpha", b"format", b"middle", b"zeta")]
    assert places == sorted(places)


def test_equal_content_gives_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """Eight entries in a random order would be the same three times once in 1.6 billion tries."""
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for file in files:
        subprocess.run([sys.executable, "-c", WRITE, str(file)], check=True)
    save_tensors(tmp_path / "own", {"a": torch.zeros(3)}, {name: name for name in "abcdefgh"})
    assert {file.read_bytes() for file in files} == {(tmp_path / "own").read_bytes()}
