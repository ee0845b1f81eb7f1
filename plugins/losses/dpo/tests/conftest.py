"""Preference files of small pictures, for every test of this member."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

MakePreferences = Callable[[Path, int], Path]


@pytest.fixture(scope="session")
def make_preferences() -> MakePreferences:
    """Writes so many rows and their pictures: chosen ones are red, rejected ones are blue."""

    def write(folder: Path, count: int) -> Path:
        (folder / "pictures").mkdir()
        rows = []
        for number in range(count):
            row = {"input": f"sign {number}"}
            for place, key in enumerate(("chosen", "rejected")):
                colour = [5 * number, 0, 0]
                colour[2 * place] = 255 - 20 * number
                row[key] = f"pictures/{number}-{key}.png"
                Image.new("RGB", (32, 32), tuple(colour)).save(folder / row[key])
            rows.append(row)
        path = folder / "preferences.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
