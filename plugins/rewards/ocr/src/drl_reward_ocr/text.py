"""Which text a picture should show, and how close the text that was read comes to it.

The rules are those of the OCR reward of flow_grpo: both sides in small letters and without spaces,
a target found inside the text read counts as no edit, edits are capped at the target's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from drl.api import DataError, Prompt

QUOTE = '"'


@dataclass(frozen=True, slots=True)
class Line:
    """One line that the recogniser read, with its confidence in [0, 1]."""

    text: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Closeness:
    """``distance``: edits between target and text, at most ``length``, the target's length."""

    distance: int
    length: int

    @property
    def similarity(self) -> float:
        """One minus the share of the target that needs an edit, in [0, 1]."""
        return 1.0 - self.distance / self.length

    @property
    def exact(self) -> bool:
        """True when the target was read whole."""
        return self.distance == 0


def check_target(prompt: Prompt) -> str | None:
    """Say why a prompt cannot be scored, or None when it names a target."""
    where = f"prompt row {prompt.row} ({shortened(prompt.text)})"
    if "target" in prompt.metadata:
        target = prompt.metadata["target"]
        if not isinstance(target, str):
            return f"{where}: metadata.target must be a string, got {target!r}"
        if not target.replace(" ", ""):
            return f"{where}: metadata.target is empty"
        return None
    _, quote, rest = prompt.text.partition(QUOTE)
    if not quote:
        return f"{where}: no text in double quotes; quote it in the prompt or give metadata.target"
    if not rest.partition(QUOTE)[0].replace(" ", ""):
        return f"{where}: the quoted text is empty; quote some text or give metadata.target"
    return None


def target_of(prompt: Prompt) -> str:
    """Return ``metadata.target``, else the text between the first pair of double quotes.

    An unclosed quote reaches to the end of the prompt. Raises DataError naming the prompt row when
    there is no target, or an empty one.
    """
    problem = check_target(prompt)
    if problem is not None:
        raise DataError(problem)
    if "target" in prompt.metadata:
        return str(prompt.metadata["target"])
    return prompt.text.split(QUOTE, 2)[1]


def normalised(text: str, *, case_sensitive: bool) -> str:
    """Remove spaces (U+0020 alone) and, unless told otherwise, the case of letters."""
    plain = text.replace(" ", "")
    return plain if case_sensitive else plain.lower()


def closeness(target: str, lines: Sequence[Line], *, case_sensitive: bool = False) -> Closeness:
    """Compare a target with the lines read, joined without separator.

    Lines of confidence 0 are ignored. ``target`` must hold more than spaces.
    """
    wanted = normalised(target, case_sensitive=case_sensitive)
    joined = "".join(line.text for line in lines if line.confidence > 0)
    read = normalised(joined, case_sensitive=case_sensitive)
    if wanted in read:
        return Closeness(0, len(wanted))
    return Closeness(min(Levenshtein.distance(read, wanted), len(wanted)), len(wanted))


def shortened(text: str, limit: int = 60) -> str:
    """Return the text for a message: quoted, and cut when long."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
