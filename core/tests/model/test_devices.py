"""A device that was asked for, before anything is built."""

from __future__ import annotations

import pytest
import torch

from drl.errors import BadInput
from drl.model.devices import check_device


def test_the_processor_is_always_there() -> None:
    check_device("cluster.device", "cpu")


def test_a_gpu_that_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        BadInput, match=r"^--device is 'cuda', but torch .* sees no GPU here; use cpu"
    ):
        check_device("--device", "cuda")


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cluster.device", "cuda")
    check_device("cluster.device", "cuda:1")
    with pytest.raises(
        BadInput, match=r"'cuda:2', but this machine has 2 GPU\(s\): cuda:0 to cuda:1"
    ):
        check_device("cluster.device", "cuda:2")
