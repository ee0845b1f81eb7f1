"""The kit itself: contracts cannot be hollowed out, builders are deterministic."""

from __future__ import annotations

import pytest
import torch

from drl.testing import make_pair, make_prompt, make_sample
from drl.testing.contracts.base import ContractBase, overridden_without_reason
from drl.testing.contracts.reward import RewardContract
from drl.types import VISUAL, Sample, successor

NAME = "test_keeps_the_order"


def test_a_contract_as_it_is_overrides_nothing() -> None:
    class Plain(RewardContract):
        component = ("reward", "x")

        def test_something_of_its_own(self) -> None: ...

    assert overridden_without_reason(Plain) == []


def test_an_override_without_a_reason_is_found() -> None:
    class Silenced(RewardContract):
        def test_keeps_the_order(self) -> None: ...  # type: ignore[override]

    class Child(Silenced):
        pass

    assert overridden_without_reason(Silenced) == [NAME]
    assert overridden_without_reason(Child) == [NAME]


@pytest.mark.parametrize("hidden", [None, 3, "skipped"])
def test_a_test_replaced_by_something_else_is_found(hidden: object) -> None:
    contract = type("Hidden", (RewardContract,), {NAME: hidden, "__module__": __name__})
    assert overridden_without_reason(contract) == [NAME]


def test_an_xfail_with_a_reason_is_allowed_and_one_without_is_not() -> None:
    class Excused(RewardContract):
        @pytest.mark.xfail(reason="scores whole groups")
        def test_keeps_the_order(self) -> None: ...  # type: ignore[override]

    class Lazy(RewardContract):
        @pytest.mark.xfail
        def test_keeps_the_order(self) -> None: ...  # type: ignore[override]

    class Skipping(RewardContract):
        @pytest.mark.skip(reason="later")
        def test_keeps_the_order(self) -> None: ...  # type: ignore[override]

    assert overridden_without_reason(Excused) == []
    assert overridden_without_reason(Lazy) == [NAME]
    assert overridden_without_reason(Skipping) == [NAME]


def test_the_last_word_counts() -> None:
    class Silenced(RewardContract):
        def test_keeps_the_order(self) -> None: ...  # type: ignore[override]

    class Restored(Silenced):
        @pytest.mark.xfail(reason="known")
        def test_keeps_the_order(self) -> None: ...  # type: ignore[override]

    assert overridden_without_reason(Restored) == []


def test_a_missing_capability_skips_with_its_name() -> None:
    class Limited(ContractBase):
        component = ("reward", "x")
        capabilities = {"video": False, "grey": True}  # noqa: RUF012

    with pytest.raises(pytest.skip.Exception, match="reward 'x' states video = False"):
        Limited().require("video")
    Limited().require("grey")
    Limited().require("never heard of")


def test_samples_of_the_same_seed_are_the_same() -> None:
    first, second, other = (make_sample(seed=seed, steps=3) for seed in (1, 1, 2))
    assert torch.equal(visual(first), visual(second))
    assert not torch.equal(visual(first), visual(other))


def visual(sample: Sample) -> torch.Tensor:
    assert sample.trajectory is not None
    return sample.trajectory.latents[VISUAL]


def test_a_trajectory_has_one_more_latent_and_sigma_than_steps() -> None:
    sample = make_sample(steps=5, latent=(2, 1, 3, 3))
    trajectory = sample.trajectory
    assert trajectory is not None
    assert visual(sample).shape == (6, 2, 1, 3, 3)
    assert trajectory.sigmas.shape == (6,)
    assert trajectory.sigmas[-1] == 0
    assert (trajectory.sigmas.diff() < 0).all()
    assert trajectory.timesteps.tolist() == pytest.approx([1000, 800, 600, 400, 200])
    assert (trajectory.log_probs < 0).all()


def test_a_sample_without_steps_has_an_image_and_no_trajectory() -> None:
    sample = make_sample(index=4, group_index=2, member=1)
    assert sample.trajectory is None
    assert sample.media is not None
    assert sample.media.kind == "image"
    assert sample.media.pixels.shape == (3, 1, 16, 16)
    assert 0 <= sample.media.pixels.min() <= sample.media.pixels.max() <= 1
    assert sample.prompt == make_prompt(row=2)


def test_more_than_one_frame_is_a_video() -> None:
    sample = make_sample(pixels=torch.zeros(3, 4, 8, 8))
    assert sample.media is not None
    assert sample.media.kind == "video"


def test_a_pair_has_its_successor() -> None:
    pair = make_pair(sigma=0.25, seed=3, values={"advantage": 1.0})
    assert pair.timestep == 250.0
    assert set(pair.tensors) == {VISUAL, successor(VISUAL)}
    assert not torch.equal(pair.tensors[VISUAL], pair.tensors[successor(VISUAL)])
    assert torch.equal(pair.tensors[VISUAL], make_pair(seed=3).tensors[VISUAL])


def test_fixtures_give_the_builders(
    make_prompt: object, make_sample: object, make_pair: object, catalog: object
) -> None:
    from drl import testing
    from drl.catalog import Catalog

    assert make_prompt is testing.make_prompt
    assert make_sample is testing.make_sample
    assert make_pair is testing.make_pair
    assert isinstance(catalog, Catalog)
