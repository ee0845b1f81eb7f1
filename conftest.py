"""Fixtures of ``drl.testing`` for the plain test functions of every member."""

pytest_plugins = ["drl.testing"]
