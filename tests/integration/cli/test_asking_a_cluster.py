"""`pause`, `resume` and decisions by a resource's fields: a process, beside an API server that is away at times.

What the operator does with it is shown on a cluster (tests/acceptance); here it is done, or not, by the test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typing_extensions import override

ACCEPT, REWIND = (f"outbox-operator.dev/{verb}-checkpoint" for verb in ("accept", "rewind"))
OPEN = {"id": 7, "code": 2, "expected": "790:40", "stored": "815:42"}


class Server(ThreadingHTTPServer):
    """Keeps one resource; what it answers after a patch, the test says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.body: dict[str, Any] = {
            "metadata": {"name": "orders", "namespace": "shop", "uid": "u", "generation": 1, "annotations": {}},
            "spec": {},
            "status": {"conflicts": {"open": OPEN}},
        }
        self.patched = False
        self.then: list[object] = []
        """After a patch: a status that is answered, or a body; the last stays."""


class Requests(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        then = self.server.then
        if not self.server.patched or not then:
            return self.reply(200, self.server.body)
        answer = then.pop(0) if len(then) > 1 else then[0]
        if isinstance(answer, int):
            return self.reply(answer, {"message": "not now"})
        return self.reply(200, answer)

    def do_PATCH(self) -> None:
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.body["spec"] |= patch.get("spec", {})
        annotations = self.server.body["metadata"]["annotations"] | patch.get("metadata", {}).get("annotations", {})
        self.server.body["metadata"]["annotations"] = {k: v for k, v in annotations.items() if v is not None}
        self.server.patched = True
        self.reply(200, self.server.body)

    def reply(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    @override
    def log_message(self, format, *args):
        """Say nothing."""


@pytest.fixture
def server():
    serving = Server()
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()


@pytest.fixture
def call(server, tmp_path):
    """Runs `outbox` against the server; returns exit status and errors."""
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

    def run(*arguments):
        command = [sys.executable, "-m", "outbox_cli", *arguments, "-n", "shop", "--kubeconfig", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stderr

    return run


def ready(server, reason, uid="u"):
    found = {"type": "Ready", "status": "True", "reason": reason, "message": "m", "observedGeneration": 1}
    return {"metadata": server.body["metadata"] | {"uid": uid}, "spec": {}, "status": {"conditions": [found]}}


def test_an_api_server_that_is_away_while_it_is_waited_for_costs_time_only(server, call):
    server.then = [503, 429, ready(server, "Suspended")]
    status, err = call("pause", "orders", "--wait", "--timeout", "30")
    assert status == 0, err


def test_one_that_stays_away_is_named_in_the_end(server, call):
    server.then = [503]
    status, err = call("pause", "orders", "--wait", "--timeout", "2")
    assert status == 1
    assert "not suspended after 2 s (the API server answers 503" in err


@pytest.mark.parametrize("gone", [404, "another"])
def test_a_resource_that_goes_after_it_was_asked_is_not_told_as_nothing_was_changed(server, call, gone):
    server.then = [gone if isinstance(gone, int) else ready(server, "Suspended", uid="v")]
    status, err = call("pause", "orders", "--wait", "--timeout", "5")
    assert status == 1, "3 says that nothing was changed"
    assert "orders was asked, and went before it was suspended" in err


@pytest.mark.parametrize("reason", ["ScaledToZero", "HandedOver"])
def test_a_resource_that_handles_nothing_does_not_run(server, call, reason):
    server.then = [ready(server, reason)]
    status, err = call("resume", "orders", "--wait", "--timeout", "1")
    assert (status, reason in err) == (1, True), err


def test_the_latest_decision_stands_alone(server, call):
    server.body["metadata"]["annotations"] = {ACCEPT: "7=815:41", "theirs": "stays"}
    status, err = call("rewind", "orders", "--to", "790:40", "--conflict", "7", "--yes")
    assert status == 0, err
    assert server.body["metadata"]["annotations"] == {REWIND: "7=790:40", "theirs": "stays"}
