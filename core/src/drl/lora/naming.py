"""Names of parameters: live training key, plain name, pushed name, adapter key.

Everything works on whole path components, never on substrings, because real models have modules
called ``lora_head`` or ``weight_embed`` and adapters called ``attn``. Rules: rl-post-training.md
7.3 (pushed names) and lora.md 3.2 (keys of adapter files).
"""

from __future__ import annotations

from drl.lora.errors import LoraError

WRAPPER_COMPONENTS = frozenset(
    {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}  # FSDP1, compile, recompute
)
PEFT_PREFIX = "base_model.model."
MATRICES = ("lora_A", "lora_B")
EMBEDDING_MATRICES = ("lora_embedding_A", "lora_embedding_B")
# What wraps a module of the base model, and what adapters put beside it.
BASE_COMPONENTS = frozenset({"base_layer", "original_module"})
ADAPTER_PARTS = frozenset(
    {*MATRICES, *EMBEDDING_MATRICES, "lora_bias", "lora_start", "modules_to_save"}
)


def to_plain_name(name: str) -> str:
    """Return ``name`` as the model without adapters and wrappers would spell it.

    Drops wrapper components, then a leading ``base_model.model.``, then every ``base_layer`` or
    ``original_module`` component that is not the first. Works for module paths and for parameter
    names.
    """
    components = [part for part in name.split(".") if part not in WRAPPER_COMPONENTS]
    if components[:2] == ["base_model", "model"]:
        components = components[2:]
    kept = [part for at, part in enumerate(components) if at == 0 or part not in BASE_COMPONENTS]
    return ".".join(kept)


def split_adapter_key(key: str) -> tuple[str, str] | None:
    """Split an adapter key into module path and matrix name; None when it is no adapter key.

    The tail may be ``lora_A.<adapter>.weight``, ``lora_A.<adapter>``, ``lora_A.weight`` or
    ``lora_A`` (and the same with B). The longest form is tried first, so an adapter may itself be
    called ``lora_B`` or ``weight``.
    """
    components = key.split(".")
    for length in (3, 2, 1):
        head, tail = components[:-length], components[-length:]
        ends_well = length < 3 or tail[-1] == "weight"
        if head and tail[0] in MATRICES and ends_well:
            return ".".join(head), tail[0]
    return None


def adapter_key(fqn: str, matrix: str) -> str:
    """Return the key of a matrix in a state: ``<fqn>.lora_A.weight``, ``<fqn>.lora_embedding_A``."""
    return f"{fqn}.{matrix}" if matrix in EMBEDDING_MATRICES else f"{fqn}.{matrix}.weight"


def to_pushed_name(key: str) -> str:
    """Return the name under which an engine knows the tensor with this training key.

    Adapter tensors become ``<fqn>.lora_A`` or ``<fqn>.lora_B``, everything else its plain name
    (table of rl-post-training.md 7.3). Raises ``LoraError`` when a fragment of the wrapping would
    be left over: engines silently ignore names that they do not know.
    """
    adapter = split_adapter_key(key)
    if adapter is None:
        pushed = path = to_plain_name(key)
    else:
        path = to_plain_name(adapter[0])
        pushed = f"{path}.{adapter[1]}"
    leftover = {"base_model", *BASE_COMPONENTS, *ADAPTER_PARTS} & set(path.split("."))
    if leftover:
        raise LoraError(
            f'the training key "{key}" keeps "{sorted(leftover)[0]}" in its pushed name '
            f'"{pushed}"; an engine would ignore it. '
            "Expected <module path>.weight or "
            "<module path>.lora_A[.<adapter>][.weight]; push only names of such keys"
        )
    return pushed
