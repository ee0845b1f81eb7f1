"""Names and shapes in an ``adapter_model.bin``: a pickle, opened so that it can hold nothing but tensors."""

from __future__ import annotations

from pathlib import Path

from drl.errors import BadInput
from drl.formats.headers import Header, TensorFacts
from drl.lora.errors import LoraError
from drl.lora.peft_tensors import read_tensors

SPELLED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


def pickled_header(file: Path) -> Header:
    """Return what a header would say; the tensors are read with ``weights_only``, and dropped."""
    try:
        tensors = read_tensors(file.parent)
    except LoraError as error:
        raise BadInput(str(error)) from error
    facts = {}
    for key, tensor in tensors.items():
        name = str(tensor.dtype).removeprefix("torch.")
        facts[key] = TensorFacts(SPELLED.get(name, name), tuple(tensor.shape))
    return Header(path=file, metadata={}, tensors=facts)
