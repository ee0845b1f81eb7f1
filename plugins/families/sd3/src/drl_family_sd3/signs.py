"""Prompts for training on legible text: a scene with a sign, and what is written on it.

``python -m drl_family_sd3.signs FOLDER`` writes ``train.jsonl`` and ``heldout.jsonl``. What is drawn
depends on the seed alone; no word and no scene of one list is in the other.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 20
TRAIN, HELDOUT = 512, 64


@dataclass(frozen=True)
class Material:
    """What prompts are put together from. ``scenes`` have one place for the text, in double quotes."""

    scenes: tuple[str, ...]
    objects: tuple[str, ...]
    qualities: tuple[str, ...]
    places: tuple[str, ...]
    endings: tuple[str, ...]
    numbers: range


TRAINING = Material(
    scenes=(
        'A wooden sign above the door of a small bakery that says "{}"',
        'A chalkboard on an easel outside a cafe with "{}" written on it',
        'A neon sign in a dark window that reads "{}"',
        'A road sign on an empty country lane with the words "{}"',
        'A handmade poster taped to a lamp post that says "{}"',
        'A paper coffee cup on a table with "{}" printed on its side',
        'A book lying on a bench, its title is "{}"',
        'A painted banner between two trees in a park that says "{}"',
        'A brass plate on a green door engraved with "{}"',
        'A market stall with apples and a cardboard sign that reads "{}"',
        'A cotton bag hanging on a hook with the words "{}" on it',
        'A train platform with a blue board that says "{}"',
        'A cake on a plate with "{}" written in icing',
        'A garden gate with a round enamel sign that reads "{}"',
        'A ticket held in a hand, printed with "{}"',
        'A lighthouse wall with "{}" painted in large letters',
        'A wooden crate in a barn stamped with "{}"',
        'A small boat at a pier with the name "{}" on its bow',
        'A classroom blackboard with "{}" written in white chalk',
        'A tin box on a shelf with a label that says "{}"',
        'A mountain trail post with an arrow and the words "{}"',
        'A cinema front at night whose board shows "{}"',
        'A knitted scarf on a chair with "{}" stitched into it',
        'A glass jar of honey with a label that reads "{}"',
    ),
    objects=(
        *(
            "Bread",
            "Honey",
            "Apples",
            "Coffee",
            "Books",
            "Maps",
            "Lamps",
            "Clocks",
            "Shoes",
            "Hats",
        ),
        *("Bicycles", "Tickets", "Flowers", "Candles", "Pencils", "Guitars", "Boats", "Tools"),
        *("Blankets", "Cookies", "Postcards", "Umbrellas", "Kites", "Puzzles", "Teapots", "Spices"),
    ),
    qualities=(
        *("Fresh", "Warm", "Quiet", "Golden", "Little", "Open", "Free", "Sunny", "Daily", "Simple"),
        *("Local", "Famous", "Bright", "Early", "Second", "Royal", "Modern", "Friendly"),
    ),
    places=(
        *("Harbour", "Station", "Garden", "Museum", "Library", "Market", "Bridge", "Forest"),
        *("Valley", "Castle", "Airport", "Stadium", "Workshop", "Kitchen", "Meadow", "Tower"),
    ),
    endings=("Tour", "Shop", "Club"),
    numbers=range(2, 100, 7),
)
HELD_OUT = Material(
    scenes=(
        'A shop window at dusk with gilded letters that read "{}"',
        'A stone wall beside a path with the words "{}" carved into it',
        'A delivery van parked on a street with "{}" on its side',
        'A white mug on a desk with the text "{}"',
        'A festival flag on a tall pole that says "{}"',
        'A wooden board on the beach painted with "{}"',
        'A notebook cover with a sticker that reads "{}"',
        'A bus stop at noon with a yellow sign that says "{}"',
    ),
    objects=(
        "Lemons",
        "Violins",
        "Carpets",
        "Baskets",
        "Pancakes",
        "Marbles",
        "Feathers",
        "Buttons",
    ),
    qualities=("Gentle", "Silver", "Hidden", "Sweet", "Winter", "Clever"),
    places=("Theatre", "Island", "Orchard", "Fountain", "Gallery", "Windmill"),
    endings=("Walk", "House"),
    numbers=range(5, 100, 7),
)


def texts(material: Material) -> Iterator[str]:
    """Yield every text of one to three words that the material gives, short ones first."""
    yield from material.objects
    yield from material.places
    for quality in material.qualities:
        yield from (f"{quality} {thing}" for thing in material.objects)
        yield from (f"{quality} {place}" for place in material.places)
    for place in material.places:
        yield from (f"{place} {number}" for number in material.numbers)
        for ending in material.endings:
            yield from (f"{quality} {place} {ending}" for quality in material.qualities)


def prompts(material: Material, count: int, seed: int) -> list[dict[str, object]]:
    """Return ``count`` rows with different texts, their scenes in turn; ``metadata.target`` is the text."""
    draw = random.Random(seed)
    chosen = draw.sample([*texts(material)], count)
    scenes = draw.sample(material.scenes, len(material.scenes))
    return [
        {
            "input": scenes[place % len(scenes)].format(text),
            "metadata": {"target": text},
        }
        for place, text in enumerate(chosen)
    ]


def write(folder: Path) -> None:
    """Write both lists, one JSON object a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, material, count in (
        ("train", TRAINING, TRAIN),
        ("heldout", HELD_OUT, HELDOUT),
    ):
        rows = prompts(material, count, SEED)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write the lists into the folder that is named; 2 when there is not exactly one."""
    if len(arguments) != 1:
        print("python -m drl_family_sd3.signs FOLDER", file=sys.stderr)
        return 2
    write(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
