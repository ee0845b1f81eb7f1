"""Evaluation mode for single passes of a model that trains, without a walk through it each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


class EvaluationModes:
    """Puts models into evaluation mode and back by their modules' flags.

    ``Module.eval`` and ``train`` walk through thousands of modules, which takes the host milliseconds for
    each pass of a micro-batch. The modules of a model are listed once, at its first use.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = models
        self._modules: dict[str, list[nn.Module]] = {}
        self._own_way: set[str] = set()

    @contextmanager
    def __call__(self, component: str) -> Iterator[None]:
        """Hold a component in evaluation mode; all its modules are in its own former mode afterwards."""
        was_training = self.models[component].training
        self._set(component, training=False)
        try:
            yield
        finally:
            self._set(component, training=was_training)

    def _set(self, component: str, *, training: bool) -> None:
        model = self.models[component]
        if component not in self._modules:
            self._modules[component] = modules = list(model.modules())
            if any(type(module).train is not nn.Module.train for module in modules):
                self._own_way.add(component)
        if component in self._own_way:
            model.train(training)
            return
        for module in self._modules[component]:
            # past Module's own __setattr__, which looks for parameters and modules first
            object.__setattr__(module, "training", training)
