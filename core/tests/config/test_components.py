"""Tables of components: picked, not picked, not installed, broken, secret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from drl.catalog import Catalog
from drl.config import Recipe
from drl.config.secrets import reveal
from drl.errors import BadInput
from drl.plugins import GROUP
from drl.testing.distributions import write_distribution

Load = Callable[..., Recipe]
Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
With = Callable[..., Catalog]

PLUGIN = """
from drl.api import Component, hookimpl

DRL_API = (1, 0)

@hookimpl
def drl_register_rewards():
    return [Component("remote", "acme.reward:Remote", summary="Asks a server.",
                      config="{config}:RemoteOptions")]
"""
CONFIG = """
from pathlib import Path

from pydantic import SecretStr, model_validator

from drl.options import Field, Options


class RemoteOptions(Options):
    '''Where the server is.'''

    url: str = Field(description="Address.")
    key: SecretStr | None = Field(None, description="Key of the server.")
    words: Path | None = Field(None, description="File of words.")
    args: dict[str, int] = Field({}, description="Passed to the server.")
    low: int = Field(0, description="Least.")
    high: int = Field(1, description="Most.")

    @model_validator(mode="after")
    def _ordered(self):
        if self.low > self.high:
            raise ValueError("low must not be above high")
        return self
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> With:
    """Return a catalog with one more distribution installed, of these files."""

    def _acme(files: Mapping[str, str], name: str = "acme-drl") -> Catalog:
        site = tmp_path / name
        point = write_distribution(site, name, files)
        monkeypatch.syspath_prepend(str(site))
        return Catalog.load(installed=[*entry_points(group=GROUP), point])

    return _acme


@pytest.fixture
def remote(acme: With, request: pytest.FixtureRequest) -> Catalog:
    """A catalog with the reward ``remote``; module names are unique, as imports are kept."""
    name = f"acme_{abs(hash(request.node.name))}"
    files = {
        f"{name}/__init__.py": "",
        f"{name}/plugin.py": PLUGIN.replace("{config}", f"{name}.config"),
        f"{name}/config.py": CONFIG,
    }
    return acme(files, name)


def test_a_table_that_is_not_picked_is_checked_and_reported_as_unused(
    warnings: Warnings, problems: Problems
) -> None:
    assert warnings({"algorithm.sft_loss.sigma": "grid"}) == {
        "algorithm.sft_loss": "is not used: algorithm.loss is 'policy_loss'"
    }
    found = problems({"algorithm.sft_loss.sigma": "gird"})
    assert found == {
        "algorithm.sft_loss.sigma": "must be one of grid, logit_normal, got 'gird'; "
        "did you mean 'grid'?"
    }


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("logging.console.live", "logging.loggers is 'jsonl'"),
        ("sde.epoch_global_random_choice.candidate_steps", "sde.step_strategy is 'sde_window'"),
        (
            "reward.ocr.threads",
            "no reward term has this name; it counts where rows ask for it (metadata.rm_type)",
        ),
    ],
)
def test_the_warning_says_what_is_picked_instead(warnings: Warnings, path: str, why: str) -> None:
    value = [1] if path.endswith("steps") else 1 if path.endswith("threads") else True
    found = warnings({path: value, "logging.loggers": ["jsonl"]})
    assert found == {path.rpartition(".")[0]: f"is not used: {why}"}


def test_a_package_that_is_not_installed_is_named(
    problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [p for p in entry_points(group=GROUP) if p.dist and p.dist.name != "drl-reward-ocr"]
    bare = Catalog.load(installed=points)
    picked = problems({"reward.type": "ocr"}, catalog=bare)["reward.type"]
    assert picked.startswith(
        "no reward named 'ocr' is installed\n"
        "it ships in its own package:  pip install drl-reward-ocr\n"
        "installed: jpeg"
    )
    kept = problems({"reward.ocr.num_workers": 4}, catalog=bare)["reward.ocr"]
    assert "pip install drl-reward-ocr" in kept


def test_a_picked_component_that_is_not_installed_is_reported_once(problems: Problems) -> None:
    points = [p for p in entry_points(group=GROUP) if p.dist and p.dist.name != "drl-reward-ocr"]
    bare = Catalog.load(installed=points)
    changes = {"reward.type": "ocr", "reward.ocr.num_workers": 4}
    assert list(problems(changes, catalog=bare)) == ["reward.type"]


@pytest.mark.parametrize(
    ("path", "name", "owner"),
    [
        ("reward.type", "pickscore", "drl-reward-pickscore"),
        ("rollout.engine", "sglang", "drl-engine-sglang"),
    ],
)
def test_a_component_of_a_later_release_is_known(
    problems: Problems, path: str, name: str, owner: str
) -> None:
    message = problems({path: name})[path]
    assert f"named '{name}' is installed" in message
    assert f"known, not available in drl 0.1 (owner {owner})" in message


def test_no_package_is_made_up_from_a_typing_mistake(problems: Problems) -> None:
    message = problems({"reward.type": "jpg"})["reward.type"]
    assert "did you mean 'jpeg'?" in message
    assert "pip install" not in message


def test_a_broken_plugin_is_named_with_its_failure(problems: Problems, acme: With) -> None:
    files = {"acme_drl/__init__.py": "", "acme_drl/plugin.py": "import no_such_module"}
    message = problems({"reward.type": "tone"}, catalog=acme(files))["reward.type"]
    assert "acme-drl 1.0 failed to load: ModuleNotFoundError" in message


def test_broken_option_models_stop_only_who_picks_them(
    load: Load, problems: Problems, acme: With
) -> None:
    files = {
        "acme_odd/__init__.py": "",
        "acme_odd/plugin.py": PLUGIN.replace("{config}", "acme_odd.config"),
        "acme_odd/config.py": "raise RuntimeError('no')",
    }
    catalog = acme(files, "acme_odd")
    assert load(catalog=catalog).reward.type == "jpeg"
    message = problems({"reward.type": "remote"}, catalog=catalog)["reward.remote"]
    assert "RuntimeError: no" in message


def test_required_options_of_a_component_are_asked_for(problems: Problems, remote: Catalog) -> None:
    assert problems({"reward.type": "remote"}, catalog=remote) == {
        "reward.remote.url": "is required: Address."
    }


def test_a_rule_inside_an_option_model_is_reported_at_its_table(
    problems: Problems, remote: Catalog
) -> None:
    changes = {"reward.type": "remote", "reward.remote": {"url": "x", "low": 3}}
    (found,) = problems(changes, catalog=remote).items()
    assert found[0] == "reward.remote"
    assert found[1].startswith("low must not be above high")


def test_a_path_option_of_a_plugin_is_relative_to_the_recipe(
    load: Load, remote: Catalog, folder: Path
) -> None:
    changes = {"reward.type": "remote", "reward.remote": {"url": "x", "words": "prompts.jsonl"}}
    options: Any = load(changes, catalog=remote).term_options("remote")
    assert options.words == folder / "prompts.jsonl"


def test_a_secret_is_written_as_a_variable_and_stays_one(
    load: Load, problems: Problems, remote: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_KEY", "hunter2")
    table = {"url": "x", "key": "env:ACME_KEY"}
    recipe = load({"reward.type": "remote", "reward.remote": table}, catalog=remote)
    assert recipe.resolved()["reward"]["remote"]["key"] == "env:ACME_KEY"
    assert 'key = "env:ACME_KEY"' in recipe.to_toml()
    assert "hunter2" not in recipe.to_toml() + repr(recipe)
    options: Any = recipe.term_options("remote")
    assert reveal(options.key.get_secret_value()) == "hunter2"
    table["key"] = "hunter2"
    found = problems({"reward.type": "remote", "reward.remote": table}, catalog=remote)
    assert found == {
        "reward.remote.key": 'is a secret: write "env:NAME", the variable that holds it'
    }


def test_a_secret_of_the_wrong_type_is_not_shown(problems: Problems, remote: Catalog) -> None:
    table = {"url": "x", "key": 12345}
    found = problems({"reward.type": "remote", "reward.remote": table}, catalog=remote)
    assert found == {"reward.remote.key": "must be text"}


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACME_KEY", raising=False)
    with pytest.raises(BadInput, match="the variable ACME_KEY is not set"):
        reveal("env:ACME_KEY")
    assert reveal("plain") == "plain"


def test_tables_that_are_passed_through_keep_their_origins(load: Load, remote: Catalog) -> None:
    table = {"url": "x", "args": {"a": 1}}
    recipe = load({"reward.type": "remote", "reward.remote": table}, catalog=remote)
    assert recipe.origins["reward.remote.args.a"] == "recipe.toml"
    assert recipe.origins["reward.remote.high"] == "default"


def test_terms_are_instances_with_their_own_tables(load: Load) -> None:
    changes = {
        "reward.type": None,
        "reward.terms": [
            {"name": "jpeg"},
            {"name": "coarse", "plugin": "jpeg", "weight": 0.5},
        ],
        "reward.coarse.quality": 10,
    }
    recipe = load(changes)
    coarse: Any = recipe.term_options("coarse")
    plain: Any = recipe.term_options("jpeg")
    assert (coarse.quality, plain.quality) == (10, 75)
    assert [term.component for term in recipe.reward.all_terms] == ["jpeg", "jpeg"]
    assert [term.weight for term in recipe.reward.all_terms] == [1.0, 0.5]


def test_a_single_type_is_one_term(load: Load) -> None:
    (term,) = load().reward.all_terms
    assert (term.name, term.component, term.weight) == ("jpeg", "jpeg", 1.0)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ([{"name": "jpeg"}, {"name": "jpeg"}], "has two terms named 'jpeg'"),
        ([{"name": "type", "plugin": "jpeg"}], "which is an option of [reward]"),
        ([{"name": "jpeg", "weight": 0}], "all have weight 0"),
    ],
)
def test_terms_that_cannot_be_told_apart_are_refused(
    problems: Problems, terms: list[dict[str, Any]], said: str
) -> None:
    (message,) = problems({"reward.type": None, "reward.terms": terms}).values()
    assert said in message


def test_options_for_a_component_without_any_are_refused(problems: Problems) -> None:
    found = problems({"sde.step_strategy": "all", "sde.all.foo": 1})
    assert found == {"sde.all.foo": "unknown option: step strategy 'all' has no options, got int"}


def test_a_supervised_run_needs_no_engine(folder: Path, load: Load) -> None:
    points = [p for p in entry_points(group=GROUP) if p.dist and p.dist.name != "drl-engine-local"]
    bare = Catalog.load(installed=points)
    changes = {"algorithm.loss": "sft_loss", "train.train_only": True, "reward.type": None}
    assert load(changes, catalog=bare).train.train_only is True
