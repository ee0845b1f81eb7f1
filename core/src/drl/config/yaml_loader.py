"""YAML for override files: ``off`` stays text and ``1e-4`` is a number, as in YAML 1.2."""

from __future__ import annotations

import re

import yaml


class RecipeLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's booleans and numbers with an exponent."""


# A copy: the table of resolvers belongs to the base class.
RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
