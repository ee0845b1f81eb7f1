"""``Adapter``: what every format is read into and written from.

Its layers carry the matrices as the files do: A ``[rank, in]`` and B ``[out, rank]``, or
``[rank, in, k, k]`` and ``[out, rank, 1, 1]`` for a convolution, in the file's dtype. The strength is
one number per layer, ``scale = alpha / rank``: rank and alpha patterns and rsLoRA are folded into alpha.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drl.errors import BadInput
from drl.formats.layout import ComponentLayout, Layout
from drl.lora import LoraConfig, merge_delta
from drl.lora.errors import name_list
from drl.lora.naming import MATRICES, adapter_key


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayer:
    """The update of one layer, ``scale * B A``."""

    A: Tensor
    B: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Inner size."""
        return int(self.A.shape[0])

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that it updates."""
        return (int(self.B.shape[0]), *map(int, self.A.shape[1:]))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return ``scale * B`` ``[out, rank]`` and A ``[rank, in * k * k]``, both float64."""
        return self.B.double().flatten(1) * self.scale, self.A.double().flatten(1)


Layers = Mapping[str, AdapterLayer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Adapters of one model.

    ``components``: layers by component name and module path. ``configs``: the LoRA config of each
    component whose file had one. ``others``: trained tensors that are no LoRA matrices (biases,
    modules_to_save), by component and key of a PEFT file. ``boundary_ratio``: where a two-expert model
    changes from its first to its second component.
    """

    components: Mapping[str, Layers]
    configs: Mapping[str, LoraConfig] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    base_model: str | None = None
    boundary_ratio: float | None = None

    @property
    def single(self) -> str | None:
        """The component, when there is only one."""
        return next(iter(self.components)) if len(self.components) == 1 else None


def check_adapter(adapter: Adapter, where: object) -> None:
    """Raise BadInput, naming the layer, for tensors that are no usable adapter."""
    from drl.lora.errors import LoraError
    from drl.lora.state import check_values

    if not any(adapter.components.values()):
        raise BadInput(f"{where} holds no adapter: it has no pair of matrices")
    for layers in adapter.components.values():
        for path, layer in layers.items():
            try:
                for matrix, tensor in zip(MATRICES, (layer.A, layer.B), strict=True):
                    check_values(adapter_key(path, matrix), tensor)
            except LoraError as error:
                raise BadInput(f"{where}: {error}") from error
            check_shapes(where, path, layer)


def check_shapes(where: object, path: str, layer: AdapterLayer) -> None:
    """Raise BadInput unless A and B fit each other."""
    dims = (layer.A.dim(), layer.B.dim())
    pointwise = set(layer.B.shape[2:]) <= {1}
    if dims[0] < 2 or dims[0] != dims[1] or not pointwise or layer.A.shape[0] != layer.B.shape[1]:
        raise BadInput(
            f"{where}: the matrices of {path} do not fit: A {list(layer.A.shape)}, B "
            f"{list(layer.B.shape)}; they must be [rank, in] and [out, rank]"
        )
    if layer.rank == 0:
        raise BadInput(f"{where}: {path} has rank 0; an adapter needs a rank of 1 or more")


def misfits(adapter: Adapter, layout: Layout) -> list[str]:
    """Return what of an adapter does not fit a base model, one line each."""
    lines = []
    for component, layers in adapter.components.items():
        if component not in layout:
            lines.append(f"the base has no component '{component}'; it has {', '.join(layout)}")
            continue
        weights = layout[component].weights
        absent = [path for path in layers if path not in weights]
        if absent:
            lines.append(f"{component} of the base has no {name_list(absent)}")
        lines += [
            f"{component}.{path}: the adapter is for a weight {list(layer.shape)}, the base has "
            f"{list(weights[path])}"
            for path, layer in layers.items()
            if path in weights and layer.shape != weights[path]
        ]
    return lines


def check_fits(adapter: Adapter, layout: Layout, where: object) -> None:
    """Raise BadInput, naming everything, when an adapter does not fit a base model."""
    lines = misfits(adapter, layout)
    if lines:
        raise BadInput(f"{where} belongs to another base model:\n  " + "\n  ".join(lines[:8]))


def layers_of_state(
    state: Mapping[str, Tensor], config: LoraConfig
) -> tuple[dict[str, AdapterLayer], dict[str, Tensor]]:
    """Split the state of a PEFT file into layers, at the config's strength, and other tensors."""
    tail = adapter_key("", "lora_A")
    paths = [key.removesuffix(tail) for key in state if key.endswith(tail)]
    layers = {
        path: AdapterLayer(
            A=state[adapter_key(path, "lora_A")],
            B=state[adapter_key(path, "lora_B")],
            alpha=plain_alpha(config, path),
        )
        for path in paths
    }
    taken = {adapter_key(path, matrix) for path in paths for matrix in MATRICES}
    return layers, {key: tensor for key, tensor in state.items() if key not in taken}


def embedding_layers(adapter: Adapter, component: str) -> tuple[Layers, dict[str, Tensor]]:
    """Return the updates of embeddings among the other tensors, and the rest of those.

    An embedding's update is ``scale * (B A)^T`` with A ``[rank, rows]`` and B ``[features, rank]``, so its
    layer has the two transposed and swapped.
    """
    rest = dict(adapter.others.get(component, {}))
    layers = {}
    for key in [key for key in rest if key.endswith(".lora_embedding_A")]:
        path = key.removesuffix(".lora_embedding_A")
        A, B = rest.pop(key), rest.pop(f"{path}.lora_embedding_B")
        alpha = plain_alpha(adapter.configs[component], path)
        layers[path] = AdapterLayer(A=B.T, B=A.T, alpha=alpha)
    return layers, rest


def plain_alpha(config: LoraConfig, path: str) -> float:
    """Return the alpha that gives a module its scale as ``alpha / rank``, without rsLoRA."""
    rank = config.rank_of(path)
    return config.scale_of(path) * rank if config.use_rslora else config.alpha_of(path)


def state_of_layers(layers: Layers) -> dict[str, Tensor]:
    """Return the matrices by key of a PEFT file, without its prefix."""
    return {
        adapter_key(path, matrix): tensor
        for path, layer in layers.items()
        for matrix, tensor in zip(MATRICES, (layer.A, layer.B), strict=True)
    }


def config_of(adapter: Adapter, component: str, base: ComponentLayout | None = None) -> LoraConfig:
    """Return the LoRA config of a component: the one it came with, or one made from its layers.

    A made one names every module by its whole path; should another module of ``base`` end in the same
    path, the targets are a regular expression instead.
    """
    kept = adapter.configs.get(component)
    if kept is not None:
        return kept
    layers = adapter.components[component]
    rank = Counter(layer.rank for layer in layers.values()).most_common(1)[0][0]
    alpha = Counter(layer.alpha for layer in layers.values()).most_common(1)[0][0]
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        target_modules=_targets(layers, base.weights if base else ()),
        init="kaiming-uniform",
        rank_pattern={_exact(p): one.rank for p, one in layers.items() if one.rank != rank},
        alpha_pattern={_exact(p): one.alpha for p, one in layers.items() if one.alpha != alpha},
    )


def _targets(paths: Iterable[str], weights: Iterable[str]) -> tuple[str, ...] | str:
    chosen = sorted(paths)
    endings = tuple("." + path for path in chosen)
    if any(name.endswith(endings) and name not in chosen for name in weights):
        return "|".join(re.escape(path) for path in chosen)
    return tuple(chosen)


def _exact(path: str) -> str:
    return "^" + path.replace(".", r"\.")


def baked(adapter: Adapter) -> Adapter:
    """Return the adapter with its scale inside B (float32, rounded once), so that alpha is the rank.

    Readers that know no alpha then run it at the right strength.
    """
    components = {
        component: {
            path: AdapterLayer(
                A=layer.A,
                B=(layer.B.float() * layer.scale).to(layer.B.dtype),
                alpha=float(layer.rank),
            )
            for path, layer in layers.items()
        }
        for component, layers in adapter.components.items()
    }
    return replace(adapter, components=components, configs={})


def converted(adapter: Adapter, dtype: torch.dtype | None) -> Adapter:
    """Return the adapter with all tensors in ``dtype``; None leaves them as they are."""
    if dtype is None:
        return adapter
    return replace(
        adapter,
        components={
            component: {
                path: replace(layer, A=layer.A.to(dtype), B=layer.B.to(dtype))
                for path, layer in layers.items()
            }
            for component, layers in adapter.components.items()
        },
        others={
            component: {key: tensor.to(dtype) for key, tensor in tensors.items()}
            for component, tensors in adapter.others.items()
        },
    )


def only(adapter: Adapter, component: str | None) -> Adapter:
    """Return the adapter of one component; BadInput when it has none of that name."""
    if component is None:
        return adapter
    if component not in adapter.components:
        have = ", ".join(adapter.components)
        raise BadInput(f"--component {component}: the adapter has {have}")
    chosen = {component}
    return replace(
        adapter,
        components={name: adapter.components[name] for name in chosen},
        configs={name: one for name, one in adapter.configs.items() if name in chosen},
        others={name: one for name, one in adapter.others.items() if name in chosen},
    )


def merged_weight(W: Tensor, layer: AdapterLayer, dtype: torch.dtype) -> Tensor:
    """Return ``W + scale * B A`` in ``dtype``: product and sum in float32, rounded once."""
    total = merge_delta(W.float().flatten(1), layer.A.flatten(1), layer.B.flatten(1), layer.scale)
    return total.view(W.shape).to(dtype)
