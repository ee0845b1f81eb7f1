"""Whether a device that was asked for is there, asked before anything is built on it."""

from __future__ import annotations

import torch

from drl.errors import BadInput


def check_device(option: str, device: str) -> None:
    """Raise BadInput, which names the option, for a GPU that torch cannot use here."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return
    if not torch.cuda.is_available():
        raise BadInput(
            f"{option} is {device!r}, but torch {torch.__version__} sees no GPU here; use cpu, or look at "
            "nvidia-smi, at CUDA_VISIBLE_DEVICES and at which build of torch is installed"
        )
    count = torch.cuda.device_count()
    if number and int(number) >= count:
        raise BadInput(
            f"{option} is {device!r}, but this machine has {count} GPU(s): cuda:0 to cuda:{count - 1}"
        )
