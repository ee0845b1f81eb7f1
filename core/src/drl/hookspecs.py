"""Every hook of drl, in the order in which a run meets them; the contract of each is its docstring.

Collected hooks ask every plugin and merge the answers; only ``drl_explain_error`` ends with the
first answer. An implementation names the arguments that it wants and may leave the others out.
Nothing may depend on the order in which plugins are asked. An exception in a hook stops the run and
names the plugin. Hooks get the objects themselves and leave them unchanged, except where the
docstring says so. Run hooks are called in the driver process only.
"""

# A specification has no body: pluggy never calls it.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from drl.components import Component
    from drl.config import Recipe
    from drl.errors import Problem
    from drl.run import Run
    from drl.types import (
        CheckpointFacts,
        Claim,
        Dropped,
        EvaluationReport,
        Group,
        Rollout,
        StepReport,
        Verdict,
    )

hookspec = pluggy.HookspecMarker("drl")


@hookspec
def drl_register_families() -> Sequence[Component]:
    """Offer model families, chosen by ``model.family``; options in ``[model.<name>]``.

    Called once whenever plugins are listed or a recipe is read, so it must be cheap and pure: it
    names classes by import path and imports none of them. Targets derive from ``drl.api.Family``.
    """


@hookspec
def drl_register_engines() -> Sequence[Component]:
    """Offer rollout engines, chosen by ``rollout.engine``; options in ``[rollout.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.Engine``. An engine
    that is a server states ``served`` and the ``patch_groups`` that it knows in the component's
    ``facts``, because a recipe is checked without the class.
    """


@hookspec
def drl_register_data_sources() -> Sequence[Component]:
    """Offer data sources, chosen by ``data.source``; options in ``[data.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.DataSource``.
    """


@hookspec
def drl_register_step_strategies() -> Sequence[Component]:
    """Offer step strategies, chosen by ``sde.step_strategy``; options in ``[sde.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.StepStrategy``. The
    name must differ from those of the SDE backends, whose options share the section.
    """


@hookspec
def drl_register_sde_backends() -> Sequence[Component]:
    """Offer mathematics of a denoising step, chosen by ``sde.type``; options in ``[sde.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.SdeBackend``; state
    ``has_density`` in the component's ``facts``, because a recipe is checked without the class.
    """


@hookspec
def drl_register_rewards() -> Sequence[Component]:
    """Offer rewards, chosen by ``reward.type`` or ``[[reward.terms]]``; options in ``[reward.<term>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.Reward``.
    """


@hookspec
def drl_register_advantages() -> Sequence[Component]:
    """Offer advantage estimators, chosen by ``algorithm.advantage_estimator``.

    Cheap and pure, as ``drl_register_families``; options in ``[algorithm.<name>]``. Targets derive
    from ``drl.api.AdvantageEstimator``. The name must differ from those of the losses, whose
    options share the section.
    """


@hookspec
def drl_register_losses() -> Sequence[Component]:
    """Offer losses, chosen by ``algorithm.loss``; options in ``[algorithm.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.Loss``; state
    ``needs`` in the component's ``facts``, because a recipe is checked without the class.
    """


@hookspec
def drl_register_updaters() -> Sequence[Component]:
    """Offer ways of bringing weights to engines, chosen by ``sync.updater``; options in ``[sync.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.Updater``. With
    ``sync.updater = "auto"`` every offered updater is asked whether it fits.
    """


@hookspec
def drl_register_loggers() -> Sequence[Component]:
    """Offer loggers, chosen by the list ``logging.loggers``; options in ``[logging.<name>]``.

    Cheap and pure, as ``drl_register_families``. Targets derive from ``drl.api.Logger``.
    """


@hookspec
def drl_register_functions() -> Sequence[Component]:
    """Offer single functions, each for the option that its ``slot`` names.

    Cheap and pure, as ``drl_register_families``. A slot is an option such as ``rollout.sample_filter``;
    docs/plugins.md lists them with the signature that a target must have. Functions have no option
    table, and a name is unique within its slot.
    """


@hookspec
def drl_add_commands(cli: click.Group) -> None:
    """Add commands to ``drl``, by ``cli.add_command``.

    Called only for ``drl --help`` and for a command that drl itself does not have. A name that is
    taken is refused, and the message names the plugin.
    """


@hookspec
def drl_claim_checkpoint(checkpoint: CheckpointFacts) -> Claim | None:
    """Say that one of this plugin's families takes a checkpoint.

    Called when a recipe gives ``model.checkpoint`` without ``model.family``. A claim by a class
    of ``model_index.json`` beats a claim by a name pattern, a longer pattern beats a shorter one, and
    a tie is an error that names both families.
    """


@hookspec
def drl_default_options(recipe: Recipe) -> Mapping[str, object]:
    """Suggest values of options for this recipe, by dotted path.

    They stand above the defaults of the fields and below the recipe file, and
    ``drl config show --origin`` names their plugin. Two plugins that disagree are an error.
    """


@hookspec
def drl_check_recipe(recipe: Recipe) -> Iterable[Problem]:
    """Yield what is wrong with a recipe across its sections.

    Called after every option passed its own limits, without GPU, weights or torch. Problems of
    severity "error" stop the run together with all others; warnings are shown.
    """


@hookspec
def drl_report_header(recipe: Recipe) -> str | list[str]:
    """Return lines to print at the start of a run."""


@hookspec
def drl_run_started(run: Run) -> None:
    """Watch a run begin: the recipe is fixed, the run directory exists, nothing is loaded yet."""


@hookspec
def drl_restore_state(run: Run, state: Mapping[str, Mapping[str, object]]) -> None:
    """Take back what ``drl_save_state`` returned, on resume, before the first iteration.

    ``state`` is keyed by distribution name; a plugin reads the entry under its own name.
    """


@hookspec
def drl_filter_group(run: Run, group: Group) -> Dropped | None:
    """Say that a group should not be trained on, and why.

    Called once per group, when its last score has arrived. Every plugin is asked; one Dropped is
    enough. The reason is counted in ``rollout/dynamic_filter/drop_<reason>`` and a fresh prompt is
    drawn in its place, up to ``rollout.max_draws`` batches: beyond that the run stops and says so.
    """


@hookspec
def drl_rollout_finished(run: Run, rollout: Rollout) -> None:
    """See all kept groups of an iteration with their scores, before advantages are estimated.

    The one place where ``Sample.removed`` may be set; a removed sample takes no part in the loss.
    """


@hookspec
def drl_step_finished(run: Run, report: StepReport) -> None:
    """See one optimizer step, in order, once its reduced metrics have arrived in the driver."""


@hookspec
def drl_weights_synced(run: Run, version: int) -> None:
    """Know that every engine has confirmed weights ``version``."""


@hookspec
def drl_evaluation_finished(run: Run, report: EvaluationReport) -> Verdict | None:
    """See an evaluation; may answer with a verdict.

    ``Verdict("keep", reason)`` keeps the checkpoint of this iteration, ``Verdict("stop", reason)``
    ends the run well after it. One "stop" of any plugin is enough.
    """


@hookspec
def drl_save_state(run: Run) -> Mapping[str, object] | None:
    """Return what this plugin must remember over a resume, as JSON-able values, or None.

    Called for every checkpoint; the answer is stored in it under the distribution's name.
    """


@hookspec
def drl_checkpoint_saved(run: Run, path: Path) -> None:
    """Know that a checkpoint is complete at ``path``, after its atomic rename.

    Called by the loop, not by the thread that writes: with ``checkpoint.asynchronous`` at the first save
    point (one per iteration, and the end) at which the save is found finished.
    """


@hookspec(firstresult=True)
def drl_explain_error(error: BaseException, recipe: Recipe | None) -> str | None:
    """Return a hint for a failure that this plugin recognises; the first answer is shown.

    Called in the driver when a run fails: a missing driver, a server of the wrong version.
    """


@hookspec
def drl_run_finished(run: Run, error: BaseException | None) -> None:
    """Watch a run end, always: ``error`` is None after success, else the failure or the interrupt."""
