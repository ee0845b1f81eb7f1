"""Fixtures of ``drl.testing`` for the plain test functions of every member."""

import gc

pytest_plugins = ["drl.testing"]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through tests and libraries again and again.

    They are hundreds of thousands of objects that stay to the end: a fifth of the time of a small run.
    """
    gc.collect()
    gc.freeze()
