"""A checkpoint that the hub does not give: a server on loopback answers as the hub does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

READ = """
from drl.errors import BadInput
from drl_family_sd3.checkpoint import read_config
try:
    read_config("someone/something", "transformer")
except BadInput as error:
    print(error)
"""


@contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """Answer every request with this status and the hub's own code for it."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def said(tmp_path: object, **variables: str) -> str:
    """Return what a process of its own says: the library reads its variables when it is imported."""
    variables = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "GatedRepo", "only to those who accepted its licence: accept it on the page"),
        (404, "RepoNotFound", "has no such repository, or does not show it to this account"),
    ],
)
def test_what_the_hub_refuses_has_its_reason(
    tmp_path: object, status: int, code: str, reason: str
) -> None:
    with hub(status, code) as address:
        text = said(tmp_path, HF_ENDPOINT=address)
    assert text.startswith(
        "model.checkpoint: cannot read the config of transformer of someone/something: the hub "
    )
    assert reason in text
    assert "\n" not in text


def test_a_hub_that_cannot_be_reached_is_not_called_a_wrong_name(tmp_path: object) -> None:
    text = said(tmp_path, HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached, and the cache of this machine does not have it" in text
