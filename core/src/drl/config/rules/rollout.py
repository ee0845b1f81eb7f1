"""Rules about rollouts: draws and filters, own data, rewards by function, options of some models only."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import fact
from drl.config.data_choice import BLANK
from drl.config.draft import Draft
from drl.dotted import is_dotted
from drl.errors import Problem

ZERO_STD = frozenset({"zero_std", "drl.builtin.functions_rollout:zero_std"})
OWN = frozenset({"own", "drl.builtin.functions_rollout:own"})
FILTER = "rollout.dynamic_sampling_filter"
OVER = "rollout.over_sampling_batch_size"


def draws(draft: Draft) -> Iterator[Problem]:
    """B16: prompts drawn at once fill a batch; more than that has a use only where groups are dropped."""
    at_once, size = draft.get(OVER), draft.get("rollout.batch_size")
    if at_once is None:
        return
    if at_once < size:
        yield Problem(OVER, f"B16: must be at least rollout.batch_size = {size}, got {at_once}")
    elif at_once > size and not draft.get("train.train_only") and not _drops_groups(draft):
        yield Problem(
            OVER,
            f"is {at_once}: {at_once - size} groups of each rollout are made and left out, because no "
            f"{FILTER} drops any; use {size}",
            "warning",
        )


def _drops_groups(draft: Draft) -> bool:
    hooks = draft.catalog.hooks.drl_filter_group.get_hookimpls()
    chosen = draft.get(FILTER) is not None or draft.get("rollout.function") is not None
    return bool(hooks) or chosen


def spread_of_one(draft: Draft) -> Iterator[Problem]:
    """One reward has no spread: the filter would drop every group, for ever."""
    if (
        draft.get(FILTER) in ZERO_STD
        and draft.get("rollout.n_samples_per_prompt") == 1
        and not draft.get("train.train_only")
    ):
        yield Problem(
            FILTER,
            "'zero_std' drops every group of rollout.n_samples_per_prompt = 1 sample, whose std is always "
            "0; sample each prompt twice or more, or leave the filter out",
        )


def buffered_groups(draft: Draft) -> Iterator[Problem]:
    """Groups come into the buffer from over-sampling, or from a function of the recipe."""
    at_once, size = draft.get(OVER), draft.get("rollout.batch_size")
    if draft.get("rollout.buffer_filter") is None or draft.get("rollout.function") is not None:
        return
    if draft.get("train.train_only"):
        return
    if at_once is None or at_once <= size:
        yield Problem(
            "rollout.buffer_filter",
            f"is not used: nothing comes into the buffer; set {OVER} above rollout.batch_size = {size}",
            "warning",
        )


def own_data(draft: Draft) -> Iterator[Problem]:
    """Without a data set something else must find the prompts."""
    source, function = draft.get("data.source"), draft.get("rollout.function")
    managed = function is not None and function not in OWN and not draft.get("train.train_only")
    if source == BLANK:
        path = "data.source" if draft.given("data.source") else "data.global_dataset"
        if not managed:
            yield Problem(
                path,
                "gives prompts without text, and drl's own rollout needs text: set rollout.function to a "
                "function that finds its own data, or data.source to a class of yours",
            )
        if draft.get("data.prompt_data") is not None:
            yield Problem("data.prompt_data", f"has no use: {path} asks for blank prompts")
    elif not draft.get("data.global_dataset") and not is_dotted(source):
        yield Problem(
            "data.global_dataset",
            f"is false, but data.source {source!r} reads a data set; leave data.source out, or name a "
            'class of yours ("package.module:Class")',
        )


def custom_reward(draft: Draft) -> Iterator[Problem]:
    """A function of the recipe is the whole reward."""
    if draft.get("reward.custom") is None:
        return
    for path in ("reward.type", "reward.terms"):
        if draft.get(path):
            yield Problem(path, "and reward.custom are both given; keep one of them")
    for path in ("reward.key", "eval.reward_key"):
        if draft.given(path):
            yield Problem(path, "has no use: reward.custom returns one number per sample")


def evaluation_rewards(draft: Draft) -> Iterator[Problem]:
    """A set names a reward that is installed."""
    terms = [term.name for term in draft.get("reward.terms")]
    known = sorted({*draft.catalog.names("reward"), *terms})
    for number, dataset in enumerate(draft.get("eval.datasets")):
        path = f"eval.datasets[{number}].rm_type"
        if dataset.rm_type is not None and draft.get("reward.custom") is not None:
            yield Problem(path, "has no use: reward.custom scores every sample")
        elif dataset.rm_type is not None and dataset.rm_type not in known:
            have = ", ".join(known) or "none"
            yield Problem(
                path, f"no reward named {dataset.rm_type!r} is installed; there is {have}"
            )


def evaluation_function(draft: Draft) -> Iterator[Problem]:
    """A function evaluates while an engine runs."""
    if draft.get("eval.function") is not None and draft.get("train.train_only"):
        yield Problem(
            "eval.function", "is not used: train.train_only runs without an engine", "warning"
        )


def sampler_of_evaluations(draft: Draft) -> Iterator[Problem]:
    """The rollout's own sampler is worth an evaluation of its own where it is another one."""
    path = "eval.rollout_sampler"
    if not draft.get(path) or draft.get("sde.type") != "ode":
        return
    if draft.get("eval.num_steps") in {None, draft.get("sampling.num_steps")}:
        yield Problem(
            path,
            "scores every held-out sample twice: sde.type is 'ode', which is the evaluation's own sampler; "
            "set it to false",
            "warning",
        )


def videos_only(draft: Draft) -> Iterator[Problem]:
    """Frames per second belong to a video."""
    if draft.get("sampling.fps") is None:
        return
    media = fact(draft, "family", "model.family", "media", ("video",))
    if "video" not in media:
        yield Problem(
            "sampling.fps",
            f"has no use: family {draft.get('model.family')!r} makes pictures, not videos",
        )
    elif draft.get("sampling.num_frames") == 1:
        yield Problem("sampling.fps", "has no use: sampling.num_frames is 1, a picture")


def second_guidance(draft: Draft) -> Iterator[Problem]:
    """A second guidance scale belongs to models of two experts, and they need it."""
    path, family = "sampling.guidance_scale_2", draft.get("model.family")
    one_expert = {"transformer": "guidance_scale"}
    options = fact(draft, "family", "model.family", "guidance_options", one_expert)
    name = path.partition(".")[2]
    if draft.get(path) is not None and name not in options.values():
        yield Problem(
            path,
            f"has no use: family {family!r} has one guidance scale, sampling.guidance_scale; a second one "
            "is for models whose low-noise steps have an expert of their own",
        )
    elif draft.get(path) is None:
        trained = [c for c in draft.get("model.components") if options.get(c) == name]
        if trained:
            yield Problem(
                path, f"is required: component {trained[0]!r} of family {family!r} is guided by it"
            )


ROLLOUT_RULES = (
    draws,
    spread_of_one,
    buffered_groups,
    own_data,
    custom_reward,
    evaluation_rewards,
    evaluation_function,
    sampler_of_evaluations,
    videos_only,
    second_guidance,
)
