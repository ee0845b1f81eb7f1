"""The digest of named tensors."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from drl.mathematics import checksum
from drl.mathematics.checksum import FEW_BYTES, raw_bytes, tensors_digest


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@pytest.fixture
def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)]


def test_is_sha256_over_sorted_name_dtype_shape_and_digest_of_the_bytes() -> None:
    by_hand = hashlib.sha256()
    by_hand.update(b"('a', 'float32', (2,))" + sha256(b"\x00\x00\x80?\x00\x00\x00@"))
    by_hand.update(b"('b', 'bfloat16', ())" + sha256(b"\x80?"))
    named = {"b": torch.tensor(1.0, dtype=torch.bfloat16), "a": torch.tensor([1.0, 2.0])}
    assert tensors_digest(named.keys(), named.values()) == by_hand.hexdigest()


def test_many_bytes_are_hashed_in_pieces_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "DIGEST_BYTES", FEW_BYTES)
    sizes = (FEW_BYTES // 3, 10, FEW_BYTES // 2, FEW_BYTES * 3 // 4, 0, 7)
    tensors = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    assert len(list(checksum.pieces(tensors, FEW_BYTES))) > 1
    expected = [sha256(bytes([number]) * size) for number, size in enumerate(sizes)]
    assert list(checksum.content_digests(tensors)) == expected
    assert list(checksum.content_digests(tensors[:2])) == expected[:2]


def test_order_of_arguments_does_not_matter(tensors: list[Tensor]) -> None:
    assert tensors_digest(["x", "y"], tensors) == tensors_digest(["y", "x"], tensors[::-1])


def test_memory_layout_does_not_matter(tensors: list[Tensor]) -> None:
    strided = [tensor.repeat_interleave(2, 0)[::2] for tensor in tensors]
    transposed = [tensors[0].t().contiguous().t(), tensors[1]]
    assert not transposed[0].is_contiguous()
    expected = tensors_digest(["x", "y"], tensors)
    assert expected == tensors_digest(["x", "y"], strided)
    assert expected == tensors_digest(["x", "y"], transposed)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.nextafter(torch.tensor(9.0)),
        lambda t: t.double(),
        lambda t: t.reshape(4, 3),
        lambda t: t[:2],
    ],
    ids=["one ulp", "dtype", "shape", "rows"],
)
def test_any_change_shows(tensors: list[Tensor], change) -> None:  # type: ignore[no-untyped-def]
    changed = [change(tensors[0]), tensors[1]]
    assert tensors_digest(["x", "y"], changed) != tensors_digest(["x", "y"], tensors)


def test_a_renamed_tensor_shows(tensors: list[Tensor]) -> None:
    assert tensors_digest(["x", "z"], tensors) != tensors_digest(["x", "y"], tensors)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_takes_any_dtype_and_empty_tensors(dtype: torch.dtype) -> None:
    some, none = torch.ones(3, dtype=dtype), torch.ones(0, 3, dtype=dtype)
    assert len(tensors_digest(["x", "y"], [some, none])) == 64


def test_reads_contiguous_tensors_in_place(tensors: list[Tensor]) -> None:
    view = raw_bytes(tensors[0])
    tensors[0].zero_()
    assert bytes(view) == b"\x00" * 48


def test_parameters_can_be_digested() -> None:
    layer = torch.nn.Linear(2, 2)
    state = dict(layer.named_parameters())
    detached = {name: tensor.detach() for name, tensor in state.items()}
    assert tensors_digest(state, state.values()) == tensors_digest(detached, detached.values())


def test_repeated_names_and_unequal_lengths_are_refused(tensors: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="'x' occurs twice"):
        tensors_digest(["x", "x"], tensors)
    with pytest.raises(ValueError, match="longer"):
        tensors_digest(["x"], tensors)
