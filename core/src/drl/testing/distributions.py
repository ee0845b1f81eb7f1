"""Installed distributions made by a test: metadata and modules in a folder, without pip."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

from drl.plugins import GROUP, normalized

MINIMAL_PLUGIN = """
from drl.api import Component, hookimpl

DRL_API = (1, 0)

@hookimpl
def drl_register_rewards():
    return [Component('tone', 'tone.reward:Tone', summary='How bright.')]
"""
"""A plugin module that offers the reward ``tone``; its class is not there."""


def write_distribution(
    site: Path,
    name: str,
    files: Mapping[str, str],
    *,
    version: str = "1.0",
    entry_point: str | None = None,
) -> EntryPoint:
    """Write a distribution into ``site`` as pip would, with ``files`` by path; return its entry point.

    The entry point, in the group of drl's plugins, is ``<package>.plugin`` unless given. It is found
    by every Python that has ``site`` on its path.
    """
    package = normalized(name).replace("-", "_")
    info = site / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    target = entry_point or f"{package}.plugin"
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {target}\n")
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for found in distributions(name=name, path=[str(site)]):
        for point in found.entry_points:
            return point
    raise AssertionError(f"{name} was written but is not found in {site}")
