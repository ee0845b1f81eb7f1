"""Targets and closeness, by hand and against the reference implementation's numbers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.api import DataError, Prompt
from drl_reward_ocr.text import Line, check_target, closeness, normalised, shortened, target_of

GOLDEN = Path(os.environ.get("DRL_GOLDEN", Path(__file__).parents[5] / "shared" / "golden"))
RECOGNISER_TROUBLE: dict[str, list[tuple[str, float]]] = {"outer_empty": []}
"""The reference's recogniser answers with an empty list there: nothing was read."""


def golden_cases() -> list[dict[str, Any]]:
    """The scored cases of ocr_reward.json; none when the folder is absent."""
    path = GOLDEN / "ocr_reward.json"
    if not path.exists():
        return []
    cases: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return cases


def lines_of(recognised: Any) -> list[Line]:
    if isinstance(recognised, str):
        recognised = RECOGNISER_TROUBLE[recognised]
    return [Line(text, confidence) for text, confidence in recognised or []]


def prompt(text: str, **metadata: object) -> Prompt:
    return Prompt(row=7, text=text, metadata=metadata)


@pytest.mark.skipif(not golden_cases(), reason="no golden numbers at $DRL_GOLDEN")
def test_gives_the_reference_rewards() -> None:
    compared = 0
    for case in golden_cases():
        if case["recognised"] == "raises" or isinstance(case["reward"], dict):
            continue
        close = closeness(target_of(prompt(case["prompt"])), lines_of(case["recognised"]))
        assert close.similarity == pytest.approx(case["reward"], abs=1e-12), case["name"]
        compared += 1
    assert compared == len(golden_cases()) - 7  # six have no target, one has no reading


@pytest.mark.skipif(not golden_cases(), reason="no golden numbers at $DRL_GOLDEN")
def test_refuses_what_the_reference_crashes_on() -> None:
    crashing = [case["prompt"] for case in golden_cases() if isinstance(case["reward"], dict)]
    assert len(crashing) == 6
    assert all(check_target(prompt(text)) is not None for text in crashing)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('sign "WIND"', "WIND"),
        ('"one" and "two"', "one"),
        ('a sign "cat', "cat"),
        ('a "two words" sign', "two words"),
        ('say "a\\"b"', "a\\"),
        ('a "\t" sign', "\t"),
    ],
)
def test_target_is_the_first_quoted_text(text: str, target: str) -> None:
    assert target_of(prompt(text)) == target


def test_metadata_target_wins_and_may_hold_quotes() -> None:
    known = prompt('a sign saying "It\'s \\"open\\""', target='It\'s "open"')
    assert check_target(known) is None
    assert target_of(known) == 'It\'s "open"'
    read = [Line('IT\'S "OPEN"', 0.9)]
    assert closeness(target_of(known), read).exact


@pytest.mark.parametrize(
    ("known", "complaint"),
    [
        (prompt("a sign"), "no text in double quotes"),
        (prompt("a 'cat' sign"), "no text in double quotes"),
        (prompt("a “cat” sign"), "no text in double quotes"),
        (prompt('a "" sign'), "quoted text is empty"),
        (prompt('a "   " sign'), "quoted text is empty"),
        (prompt('a "cat" sign', target=""), "metadata.target is empty"),
        (prompt('a "cat" sign', target=4), "must be a string, got 4"),
        (prompt('a "cat" sign', target=None), "must be a string, got None"),
    ],
)
def test_a_prompt_without_target_is_named_by_its_row(known: Prompt, complaint: str) -> None:
    problem = check_target(known)
    assert problem is not None
    assert complaint in problem
    assert "prompt row 7" in problem
    with pytest.raises(DataError, match="prompt row 7"):
        target_of(known)


def test_a_long_prompt_is_cut_in_messages() -> None:
    problem = check_target(prompt("word " * 100))
    assert problem is not None
    assert len(problem) < 200
    assert shortened("ab", 2) == "'ab'"
    assert shortened("abc", 2) == "'a…'"


def test_similarity_by_hand() -> None:
    close = closeness("OPEN", [Line("0PEM", 0.9)])
    assert (close.distance, close.length, close.similarity, close.exact) == (2, 4, 0.5, False)


def test_distance_is_capped_at_the_target() -> None:
    assert closeness("cat", [Line("z" * 50, 0.9)]).distance == 3


def test_nothing_read_is_no_similarity() -> None:
    assert closeness("cat", []).similarity == 0.0


def test_lines_are_joined_and_those_without_confidence_dropped() -> None:
    lines = [Line("Hello", 0.9), Line("xx", 0.0), Line("World", 1e-6)]
    assert closeness("Hello World", lines).exact


def test_case_counts_when_asked() -> None:
    assert closeness("Open", [Line("OPEN", 1.0)], case_sensitive=False).distance == 0
    assert closeness("Open", [Line("OPEN", 1.0)], case_sensitive=True).distance == 3


def test_only_plain_spaces_are_removed() -> None:
    assert normalised("A b\u00a0C\t", case_sensitive=False) == "ab\u00a0c\t"
    assert normalised("A b", case_sensitive=True) == "Ab"


words = st.text("abcXYZ żółw🐢", min_size=1, max_size=8).filter(lambda text: text.strip(" "))


@settings(max_examples=150, deadline=None)
@given(words, st.lists(words, max_size=3))
def test_closeness_is_a_share_and_whole_only_where_the_target_was_read(
    target: str, read: list[str]
) -> None:
    close = closeness(target, [Line(text, 0.9) for text in read])
    assert 0.0 <= close.similarity <= 1.0
    assert 0 <= close.distance <= close.length
    plain = normalised(target, case_sensitive=False)
    assert close.exact is (plain in normalised("".join(read), case_sensitive=False))
    assert close.length == len(plain)


@settings(max_examples=100, deadline=None)
@given(words, words, words)
def test_text_around_the_target_and_spaces_in_it_cost_nothing(
    target: str, before: str, after: str
) -> None:
    spaced = " ".join(target)
    assert closeness(target, [Line(before + spaced + after, 0.5)]).exact
    split = [Line(before, 0.5), Line(target.swapcase(), 0.5), Line(after, 0.5)]
    assert closeness(target, split).exact


@pytest.mark.parametrize(
    ("confidence", "counts"), [(0.0, False), (1e-9, True), (1.0, True), (-1.0, False)]
)
def test_a_line_without_any_confidence_was_not_read(confidence: float, counts: bool) -> None:
    assert closeness("open", [Line("open", confidence)]).exact is counts


@pytest.mark.parametrize(("length", "cut"), [(59, False), (60, False), (61, True)])
def test_messages_keep_sixty_letters_of_a_prompt(length: int, cut: bool) -> None:
    text = "x" * length
    assert shortened(text) == (repr("x" * 59 + "…") if cut else repr(text))


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"target": 7}, "metadata.target must be a string, got 7"),
        ({"target": None}, "metadata.target must be a string, got None"),
        ({"target": "  "}, "metadata.target is empty"),
        ({"target": "\t"}, None),
    ],
)
def test_a_target_of_the_metadata_is_text_and_not_blank(
    metadata: dict[str, Any], complaint: str | None
) -> None:
    found = check_target(prompt('a sign "OPEN"', **metadata))
    assert found is None if complaint is None else complaint in (found or "")
