"""The local engine, which keeps what it was told about being a server."""

from __future__ import annotations

from drl_engine_local.engine import LocalEngine

STARTED = []
"""``Launch.server`` of each start in this process, oldest first."""


class Noting(LocalEngine):
    async def start(self, launch):
        STARTED.append(launch.server)
        return await super().start(launch)


class Named(Noting):
    """A server that a recipe names by its path: its source states the facts."""

    served = True
    patch_groups = ("wan",)

    def __init__(self, options, context):
        from drl_engine_local.config import LocalOptions

        super().__init__(LocalOptions(rows=4), context)
