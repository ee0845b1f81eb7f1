"""Which picture sizes fit, and the work of a row counted layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.api import BadInput, RowShape, Sampling
from drl_family_sd3.flops import image_tokens, row_flops
from drl_family_sd3.pipeline import Sizes

REAL = Sizes(channels=16, factor=8, patch=2, largest=192)


def said(sizes: Sizes, height: int, width: int) -> dict[str, str]:
    return {problem.path: problem.message for problem in sizes.problems(height, width)}


@pytest.mark.parametrize("side", [16, 512, 1024, 3072])
def test_multiples_of_a_patch_up_to_the_largest_position_fit(side: int) -> None:
    assert said(REAL, side, 16) == said(REAL, 16, side) == {}


@pytest.mark.parametrize(
    ("side", "below", "above"), [(15, 16, 32), (17, 16, 32), (1000, 992, 1008), (1, 16, 32)]
)
def test_other_sizes_get_the_two_next_ones(side: int, below: int, above: int) -> None:
    found = said(REAL, side, 512)
    assert found == {
        "sampling.height": f"{side} is no multiple of 16 (8 pixels per latent, 2 latents per patch); "
        f"use {below} or {above}"
    }


def test_a_side_without_positions_is_told_the_largest() -> None:
    assert said(REAL, 512, 3088) == {
        "sampling.width": "3088 is above 3072, the largest side this checkpoint has positions for"
    }


sizes = st.builds(
    Sizes,
    channels=st.just(4),
    factor=st.sampled_from([1, 2, 4, 8]),
    patch=st.integers(1, 4),
    largest=st.integers(2, 64),
)


@settings(deadline=None)
@given(sizes, st.integers(1, 4000))
def test_what_is_suggested_would_fit(kind: Sizes, side: int) -> None:
    step = kind.factor * kind.patch
    for message in said(kind, side, step).values():
        if "use " in message:
            lower, higher = (int(word) for word in message.rpartition("use ")[2].split(" or "))
            assert lower % step == higher % step == 0
            assert lower <= max(side, step) <= higher
            assert higher - lower == step


@settings(deadline=None)
@given(sizes, st.integers(1, 300), st.integers(1, 300))
def test_latents_have_the_size_or_the_request_is_refused(
    kind: Sizes, height: int, width: int
) -> None:
    sampling = Sampling(num_steps=1, height=height, width=width)
    if said(kind, height, width):
        with pytest.raises(BadInput):
            kind.latent(sampling)
    else:
        assert kind.latent(sampling) == (4, height // kind.factor, width // kind.factor)


def test_every_misfit_is_told_at_once() -> None:
    with pytest.raises(BadInput) as refusal:
        REAL.latent(Sampling(num_steps=1, height=3, width=5, num_frames=2))
    for path in ("sampling.height", "sampling.width", "sampling.num_frames"):
        assert f"{path}: " in str(refusal.value)


def linear(rows: int, features: int, outputs: int) -> int:
    return 2 * rows * features * outputs


def attention(queries: int, keys: int, width: int) -> int:
    """Scores and the weighted sum: two products, over all heads."""
    return 2 * queries * keys * width * 2


@pytest.mark.parametrize("dual", [(), (0,), (0, 1)])
def test_the_work_of_a_row_is_the_sum_of_its_matrix_products(dual: tuple[int, ...]) -> None:
    width, text, heads, head, layers = 48, 7, 4, 12, 3
    config: dict[str, Any] = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": None,
        "pooled_projection_dim": 20,
        "joint_attention_dim": 40,
        "caption_projection_dim": width,
        "dual_attention_layers": dual,
    }
    shape = RowShape(latent=(16, 8, 12), text_tokens=text)
    image = 4 * 6
    assert image_tokens(config, shape) == image
    total = linear(image, 16 * 4, width) + linear(text, 40, width)  # patches and text come in
    total += linear(1, 256, width) + linear(1, width, width)  # time
    total += linear(1, 20, width) + linear(1, width, width)  # pooled text
    for block in range(layers):
        last, twice = block == layers - 1, block in dual
        total += linear(1, width, width * (9 if twice else 6))  # modulation of the image
        total += linear(1, width, width * (2 if last else 6))  # and of the text
        total += 4 * linear(image, width, width) + 2 * linear(image, width, 4 * width)
        total += 3 * linear(text, width, width)
        if not last:
            total += linear(text, width, width) + 2 * linear(text, width, 4 * width)
        total += attention(image + text, image + text, width)
        if twice:
            total += 4 * linear(image, width, width) + attention(image, image, width)
    total += linear(1, width, 2 * width) + linear(image, width, 4 * 16)  # out
    found = row_flops(config, shape)
    assert found.forward == total
    assert found.backward == 2 * total


def test_other_channels_out_and_videos_are_counted_by_their_own_axes() -> None:
    config: dict[str, Any] = {
        "num_layers": 1,
        "num_attention_heads": 1,
        "attention_head_dim": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 8,
        "pooled_projection_dim": 8,
        "joint_attention_dim": 8,
        "caption_projection_dim": 8,
    }
    shape = RowShape(latent=(4, 4, 4), text_tokens=1)
    doubled = row_flops(config, shape).forward
    single = row_flops({**config, "out_channels": 4}, shape).forward
    assert doubled - single == linear(4, 8, 4 * 4)
