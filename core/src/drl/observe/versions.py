"""What a run was made with, for ``plugins.json``: nothing about whose machine it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "numpy",
    "safetensors",
    "pydantic",
    "pluggy",
    "pillow",
)


def versions(
    distributions: Iterable[tuple[str, str]] = (),
    components: Iterable[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return Python, platform and package versions; imports none of the packages.

    ``distributions``: (name, version) of the plugins in use, as ``Catalog.distributions``;
    ``components``: what the recipe picked, as mappings with kind, name, distribution and version.
    Host names and paths are left out; the kernel's own version is too, since it may hold both.
    """
    names = (*LIBRARIES, "drl-core", "drl-cli")
    packages = {name: version for name in names if (version := _installed(name)) is not None}
    packages |= dict(distributions)
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": dict(sorted(packages.items())),
        "components": [dict(component) for component in components],
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
