"""On which addresses the process of a rank listens."""

from __future__ import annotations

import os
from pathlib import Path

from drl.model.parallel import Ranks


def listening() -> dict[str, str]:
    """Return the sockets on which this process listens: inode to row of /proc/net/tcp."""
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    mine = {link.readlink().name for link in links if link.is_symlink()}
    rows = [
        row
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        row.split()[9]: row
        for row in rows
        if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in mine
    }


LISTENING: dict[str, str] = {}
"""What this process listened on before the ranks began: tests before these may have left something."""


def collectives_stay_on_the_loopback_interface(ranks: Ranks) -> None:
    """No rank listens on an address that another machine reaches."""
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for inode, row in listening().items():
        if inode not in LISTENING:
            assert row.split()[1].split(":")[0] in loopback, row
