"""Frozen layers plus trainable low-rank updates (lora.md 2.1): Linear, convolutions, Embedding.

A layer holds any number of named adapters. Those in ``active`` add their update to the base output,
in that order; parameter names are PEFT's (``<fqn>.lora_A.<adapter>.weight``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from drl.lora.errors import LoraError
from drl.lora.init import BASE_SCHEMES, INIT_SCHEMES, Factors, embedding_start

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Settings of one adapter in one layer. ``scale`` multiplies B A; ``init`` names the start."""

    rank: int
    alpha: float
    scale: float
    init: str = "gaussian"
    dropout: float = 0.0


class StartValues(nn.Module):
    """A0 [rank, in] and B0 [out, rank] that ``pissa`` and ``olora`` subtract; float32, frozen.

    Buffers outside the state dict: they follow from the base weight and are never trained.
    """

    A: torch.Tensor
    B: torch.Tensor

    def __init__(self, A: torch.Tensor, B: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("A", A, persistent=False)
        self.register_buffer("B", B, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in] to B0 A0 x [..., out] in x's dtype."""
        return F.linear(F.linear(x, self.A.to(x.dtype)), self.B.to(x.dtype))


class LoraLayer(nn.Module):
    """``y = base(x) + sum over active adapters of scale * B(A(dropout(x)))``.

    ``lora_bias`` holds an adapter's own copy of the base bias (``bias`` in ``LoraConfig``), used
    instead of the base bias while that adapter is active. ``merged`` names the adapters that the
    base weight contains at the moment, and ``pristine`` the tensors to restore then.
    """

    matrices: ClassVar[tuple[str, str]] = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict()
        self.lora_bias = nn.ParameterDict()
        self.lora_start = nn.ModuleDict()
        self.settings: dict[str, AdapterSettings] = {}
        self.active: tuple[str, ...] = ()
        self.merged: tuple[str, ...] = ()
        self.pristine: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that this layer has."""
        return tuple(dict.fromkeys((*self.settings, *self.lora_bias)))

    # Code around a layer reads these (for example ``proj.weight.dtype`` in diffusers blocks).
    @property
    def weight(self) -> torch.Tensor:
        """The base weight, without the update."""
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """The base bias, or the active adapter's own."""
        owner = bias_owner(self.active, self.lora_bias)
        return self.base_layer.bias if owner is None else self.lora_bias[owner]  # type: ignore[return-value]

    @property
    def down(self) -> nn.Parameter:
        """A of the adapter called "default"."""
        return self.factors(DEFAULT)[0]

    @property
    def up(self) -> nn.Parameter:
        """B of the adapter called "default"."""
        return self.factors(DEFAULT)[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the base layer plus the active updates, in the base output's dtype."""
        if self.merged:
            return self.base_layer(x)  # type: ignore[no-any-return]
        output = self._base_output(x)
        for name in self.active:
            if name in self.settings:
                output = output + self.update(x, name).to(output.dtype)
        return output

    def _base_output(self, x: torch.Tensor) -> torch.Tensor:
        owner = bias_owner(self.active, self.lora_bias)
        if owner is None:
            return self.base_layer(x)  # type: ignore[no-any-return]
        bias = self.lora_bias[owner].to(self.base_layer.bias.dtype)  # type: ignore[union-attr, arg-type]
        return functional_call(self.base_layer, {"bias": bias}, (x,))  # type: ignore[no-any-return]

    def add(self, name: str, settings: AdapterSettings, dtype: torch.dtype) -> None:
        """Add an adapter on the base weight's device (meta included), its values uninitialised."""
        device = self.weight.device
        self._add_factors(name, settings.rank, device, dtype)
        dropout = nn.Dropout(settings.dropout) if settings.dropout > 0 else nn.Identity()
        self.lora_dropout[name] = dropout.train(self.training)
        if settings.init in BASE_SCHEMES:
            shapes = [factor.shape for factor in self.factors(name)]
            self.lora_start[name] = StartValues(*(torch.empty(s, device=device) for s in shapes))
        self.settings[name] = settings

    def remove(self, name: str) -> None:
        """Forget an adapter; one that this layer does not have is no error."""
        for holder in (*self._factor_holders(), self.lora_dropout, self.lora_bias, self.lora_start):
            if name in holder:
                del holder[name]
        self.settings.pop(name, None)
        self.active = tuple(kept for kept in self.active if kept != name)

    def start(self, name: str, generator: torch.Generator, W: torch.Tensor | None) -> Factors:
        """Return start values A and B in float32 and in the shapes of ``factors``.

        ``W``: the whole base weight, for the schemes that read it.
        """
        settings = self.settings[name]
        if settings.init in BASE_SCHEMES:
            if W is None:
                raise LoraError(f'init = "{settings.init}" needs the base weight')
            return BASE_SCHEMES[settings.init](W, settings.rank, settings.scale)
        A, B = self.factors(name)
        drawn = INIT_SCHEMES[settings.init](settings.rank, A[0].numel(), B.shape[0], generator)
        return drawn[0].reshape(A.shape), drawn[1].reshape(B.shape)

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Return A and B of an adapter."""
        down, up = self._factor_holders()
        return down[name].weight, up[name].weight  # type: ignore[return-value, union-attr]

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B of an adapter of this rank."""
        raise NotImplementedError

    def start_values(self, name: str) -> Factors:
        """Return A0 and B0 that an adapter started from the base weight subtracts, float32."""
        start = self.lora_start[name]
        assert isinstance(start, StartValues)
        return start.A, start.B

    def flat(self, A: torch.Tensor, B: torch.Tensor) -> Factors:
        """Return A [rank, n] and B [m, rank] so that B A, reshaped, has the weight's shape."""
        return A.flatten(1), B.flatten(1)

    def update(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return ``scale * B(A(dropout(x)))``, for ``pissa`` and ``olora`` less its start value."""
        down, up = self._factor_holders()
        x = _match_dtype(x, self.factors(name)[0].dtype)
        scale = self.settings[name].scale
        # scaled between the two products, where the tensor is smallest
        delta: torch.Tensor = up[name](down[name](self.lora_dropout[name](x)) * scale)  # type: ignore[operator]
        if name in self.lora_start:
            delta = delta - self.lora_start[name](x) * scale
        return delta

    def extra_repr(self) -> str:
        """Show the adapters in the model's printout."""
        return ", ".join(
            f"{name}: rank={s.rank}, alpha={s.alpha}, scale={s.scale}"
            for name, s in self.settings.items()
        )

    def _factor_holders(self) -> tuple[nn.ModuleDict | nn.ParameterDict, ...]:
        raise NotImplementedError

    def _add_factors(self, name: str, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        raise NotImplementedError


class LoraLinear(LoraLayer):
    """An adapted Linear: A [rank, in], B [out, rank], both bias-free Linears."""

    base_layer: nn.Linear

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__(base_layer)
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()

    @property
    def in_features(self) -> int:
        """Input size."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """Output size."""
        return self.base_layer.out_features

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return [rank, in] and [out, rank]."""
        return (rank, self.in_features), (self.out_features, rank)

    def _factor_holders(self) -> tuple[nn.ModuleDict, nn.ModuleDict]:
        return self.lora_A, self.lora_B

    def _add_factors(self, name: str, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        for holder, size_in, size_out in (
            (self.lora_A, self.in_features, rank),
            (self.lora_B, rank, self.out_features),
        ):
            # Built on meta first: nn.Linear's own init would draw from the global generator.
            linear = nn.Linear(size_in, size_out, bias=False, device="meta", dtype=dtype)
            holder[name] = linear.to_empty(device=device)


CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class LoraConv(LoraLayer):
    """An adapted convolution: A [rank, in, *kernel] moves like the base, B [out, rank, 1…] mixes.

    Groups, dilation and padding other than zeros are refused: PEFT's A ignores them, so that the
    same tensors would compute something else there.
    """

    base_layer: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def __init__(self, base_layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(base_layer)
        plain = base_layer.groups == 1 and base_layer.padding_mode == "zeros"
        if not plain or any(step != 1 for step in base_layer.dilation):
            raise LoraError(
                f"{base_layer} cannot be adapted: only convolutions with groups 1, dilation 1 and "
                "zero padding can; list it in exclude_modules"
            )
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()

    @property
    def in_channels(self) -> int:
        """Input channels."""
        return self.base_layer.in_channels

    @property
    def out_channels(self) -> int:
        """Output channels."""
        return self.base_layer.out_channels

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Size of the kernel."""
        return self.base_layer.kernel_size

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return [rank, in, *kernel] and [out, rank, 1…]."""
        ones = (1,) * len(self.kernel_size)
        return (rank, self.in_channels, *self.kernel_size), (self.out_channels, rank, *ones)

    def _factor_holders(self) -> tuple[nn.ModuleDict, nn.ModuleDict]:
        return self.lora_A, self.lora_B

    def _add_factors(self, name: str, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        base = self.base_layer
        convolution = CONVOLUTIONS[base.weight.dim() - 2]
        down = convolution(
            base.in_channels,
            rank,
            base.kernel_size,  # type: ignore[arg-type]
            stride=base.stride,  # type: ignore[arg-type]
            padding=base.padding,  # type: ignore[arg-type]
            bias=False,
            device="meta",
            dtype=dtype,
        )
        up = convolution(rank, base.out_channels, 1, bias=False, device="meta", dtype=dtype)
        self.lora_A[name] = down.to_empty(device=device)
        self.lora_B[name] = up.to_empty(device=device)


class LoraEmbedding(LoraLayer):
    """An adapted Embedding: A [rank, rows], B [features, rank], bare parameters as in PEFT.

    The row of ``padding_idx`` gets no gradient. There is no dropout: the input is an index.
    """

    matrices: ClassVar[tuple[str, str]] = ("lora_embedding_A", "lora_embedding_B")
    base_layer: nn.Embedding

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__(base_layer)
        if base_layer.max_norm is not None:
            raise LoraError(
                "an Embedding with max_norm rewrites its own weight in the forward pass and cannot "
                "be adapted; list it in exclude_modules"
            )
        self.lora_embedding_A = nn.ParameterDict()
        self.lora_embedding_B = nn.ParameterDict()

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.base_layer.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Features of a row."""
        return self.base_layer.embedding_dim

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Return A [rank, rows] and B [features, rank]."""
        return self.lora_embedding_A[name], self.lora_embedding_B[name]

    def flat(self, A: torch.Tensor, B: torch.Tensor) -> Factors:
        """Return B^T and A^T: the update of the weight [rows, features] is (B A)^T."""
        return B.T, A.T

    def start(self, name: str, generator: torch.Generator, W: torch.Tensor | None) -> Factors:
        """Return start values A and B in float32."""
        settings = self.settings[name]
        return embedding_start(
            settings.init, settings.rank, self.num_embeddings, self.embedding_dim, generator
        )

    def update(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return ``scale * B A[x]`` for indices x, one row each."""
        A, B = self.factors(name)
        rows = F.embedding(
            x,
            A.T,
            padding_idx=self.base_layer.padding_idx,
            scale_grad_by_freq=self.base_layer.scale_grad_by_freq,
        )
        return F.linear(rows * self.settings[name].scale, B)

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return [rank, rows] and [features, rank]."""
        return (rank, self.num_embeddings), (self.embedding_dim, rank)

    def _factor_holders(self) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        return self.lora_embedding_A, self.lora_embedding_B

    def _add_factors(self, name: str, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        for holder, shape in zip(self._factor_holders(), self.factor_shapes(rank), strict=True):
            holder[name] = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


def can_adapt(module: nn.Module) -> bool:
    """Say whether a module is of a class that can be adapted."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding)


def adapted(module: nn.Module) -> LoraLayer:
    """Return the wrapping layer, without adapters, of a module that can be adapted."""
    if isinstance(module, nn.Linear):
        layer: LoraLayer = LoraLinear(module)
    elif isinstance(module, nn.Embedding):
        layer = LoraEmbedding(module)
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        layer = LoraConv(module)
    else:
        raise LoraError(f"{type(module).__name__} layers cannot be adapted")
    return layer.train(module.training)


def bias_owner(active: tuple[str, ...], biases: nn.ParameterDict) -> str | None:
    """Return the active adapter that has a bias of its own here."""
    return next((name for name in active if name in biases), None)


def _match_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # asking whether autocast exists for a device cannot be compiled; the meta device has none
    if x.dtype == dtype or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
        return x
    return x.to(dtype)
