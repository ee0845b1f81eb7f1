"""Recognisers that all tests share, because loading one takes about a second."""

import pytest

from drl_reward_ocr.config import OcrOptions
from drl_reward_ocr.recogniser import Recogniser


@pytest.fixture(scope="session")
def recogniser() -> Recogniser:
    """Reads a picture as one line."""
    return Recogniser(OcrOptions())


@pytest.fixture(scope="session")
def detecting() -> Recogniser:
    """Finds lines, then reads them."""
    return Recogniser(OcrOptions(detect=True))
