"""The contracts of this distribution's plugin and updaters."""

from __future__ import annotations

from drl.testing.contracts.plugin import PluginContract
from drl.testing.contracts.updater import UpdaterContract


class TestPlugin(PluginContract):
    distribution = "drl-updater-in-process"


class TestInProcessFull(UpdaterContract):
    component = ("updater", "in_process_full")


class TestInProcessMerged(UpdaterContract):
    component = ("updater", "in_process_merged")


class TestInProcessLora(UpdaterContract):
    component = ("updater", "in_process_lora")
