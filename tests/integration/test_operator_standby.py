"""A replica of the operator that stands by, as a process, beside an API server that says who is active."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEASE = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "outbox-operator", "namespace": "system", "resourceVersion": "7"},
    "spec": {"holderIdentity": "another", "leaseDurationSeconds": 3600},
}


class Held(BaseHTTPRequestHandler):
    """Answers every question with the Lease that another replica holds."""

    def do_GET(self) -> None:
        text = json.dumps(LEASE).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Held)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    path = tmp_path / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
    }
    path.write_text(json.dumps(config))
    yield path
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_standby_ends_by_its_own_handler_when_it_is_told_to(kubeconfig: Path):
    # Of the first process of a container the kernel drops a signal that nobody handles: it would live until SIGKILL.
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": "system"}
    command = [sys.executable, "-m", "outbox_operator", "--port", "0", "--cluster-id", "here"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert "standing by" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert "ended" in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
