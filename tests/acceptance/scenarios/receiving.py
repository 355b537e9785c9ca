"""Target `http` and an HTTPS server in a pod: signed events arrive, and a new token in the Secret is taken up."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.acceptance.scenarios import Scenarios
from tests.support.kubernetes.cluster import REGISTRY
from tests.support.servers.certificates import make_certificates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.cluster import Body
    from tests.support.kubernetes.room import Room

scenarios = Scenarios()

SERVER = """
import http.server, json, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        taken = self.headers["Authorization"] == "Bearer token-2"
        told = {name.lower(): value for name, value in self.headers.items()}
        print(json.dumps({"taken": taken, "body": body, "headers": told}), flush=True)
        self.send_response(202 if taken else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tls/server.crt", "/tls/server.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
SIGNING = base64.b64encode(b"0123456789abcdef01234567").decode()


@scenarios.add
def signed_events_reach_an_https_server_and_a_new_token_is_read_from_the_secret(rooms: Rooms) -> None:
    with rooms.room() as room, receiver(room) as authority:
        keys = {"ca.crt": authority, "signingKey": SIGNING, "token": "token-1"}
        room.cluster.apply(secret(room, "receiver", keys))
        target = {"http": {"url": "https://receiver:8443/orders", "connection": {"secretRef": {"name": "receiver"}}}}
        orders = room.processor("orders", target=target)
        orders.until_ready()
        room.shop.produce(3, key="order-1")
        said = orders.until_condition("Ready", "False", "AuthenticationFailed")
        assert "correct `token`" in said["message"]
        room.cluster.apply(secret(room, "receiver", keys | {"token": "token-2"}))
        # The kubelet brings a changed Secret into a pod within about a minute.
        orders.until("three events", lambda: len(taken(room)) == 3, within=180)
        orders.until_ready()
        for number, (event, headers) in enumerate(taken(room)):
            assert (event["data"], event["partitionkey"], event["specversion"]) == ({"n": number}, "order-1", "1.0")
            assert headers["idempotency-key"] == event["id"]
        told = room.cluster.get("OutboxProcessor", room.namespace, "orders")
        assert "token-" not in json.dumps(told)


def taken(room: Room) -> list[tuple[Body, dict[str, str]]]:
    """The events that the receiver took, in order, each checked against its signature."""
    found = []
    for line in room.cluster.log(room.namespace, "receiver").splitlines():
        request = json.loads(line)
        headers, body = request["headers"], request["body"]
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}".encode()
        expected = hmac.new(base64.b64decode(SIGNING), signed, hashlib.sha256).digest()
        assert headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"
        if request["taken"]:
            found.append((json.loads(body), headers))
    return found


def secret(room: Room, name: str, keys: dict[str, str]) -> Body:
    meta = {"name": name, "namespace": room.namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": keys}


@contextmanager
def receiver(room: Room) -> Iterator[str]:
    """A pod and a Service `receiver`, with the image that workers have; gives the authority of its certificate."""
    with TemporaryDirectory() as folder:
        make_certificates(Path(folder), "DNS:receiver")
        files = {name: (Path(folder) / name).read_text() for name in ("server.crt", "server.key", "ca.crt")}
    authority = files.pop("ca.crt")
    room.cluster.apply(secret(room, "receiver-tls", files))
    meta: dict[str, Any] = {"name": "receiver", "namespace": room.namespace}
    container = {
        "name": "receiver",
        "image": f"{REGISTRY}/outbox-worker:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SERVER],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
    }
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}
        },
        "containers": [container],
        "volumes": [{"name": "tls", "secret": {"secretName": "receiver-tls", "defaultMode": 0o440}}],
    }  # fmt: skip
    labels = {"app": "receiver"}
    room.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"labels": labels}, "spec": spec})
    ports = [{"port": 8443, "protocol": "TCP"}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": labels, "ports": ports}}
    room.cluster.apply(service)
    try:
        yield authority
    finally:
        for kind in ("Service", "Pod"):
            room.cluster.delete(kind, room.namespace, "receiver", grace=0)
