"""Stands between an operator and the real API server: counts its calls, and keeps from its watches what a test says."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

if TYPE_CHECKING:
    from tests.support.kubernetes.cluster import Cluster

_PASSED_ON = ("Authorization", "Content-Type", "Accept", "User-Agent")
_READING = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def verb_and_kind(method: str, path: str) -> tuple[str, str]:
    """Name a call as RBAC does: `list pods`, `patch outboxprocessors/status`."""
    url = urlsplit(path)
    steps = url.path.strip("/").split("/")
    steps = steps[2:] if steps[0] == "api" else steps[3:]
    if steps[:1] == ["namespaces"] and len(steps) > 2:
        steps = steps[2:]
    plural, name, *below = [*steps, "", ""]
    verb = _READING[method]
    if verb == "get" and not name:
        verb = "watch" if "watch" in parse_qs(url.query) else "list"
    return verb, "/".join((plural, *filter(None, below)))


class ApiProxy(ThreadingHTTPServer):
    """Forwards every call as it is, with its caller's own token; use as a context manager.

    Attributes:
        hidden: (type, kind) of the events that no watch delivers, for example ("DELETED", "Pod").
        refused: the calls that were answered with 403.
        calls: how often each (verb, kind) was called.
        written: how often each (verb, kind) that writes was called and not refused.

    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarder)
        self.target = urlsplit(cluster.server)
        self.tls = ssl.create_default_context(cafile=cluster.authority)
        self.hidden: set[tuple[str, str]] = set()
        self.refused: list[str] = []
        self.calls: Counter[tuple[str, str]] = Counter()
        self.written: Counter[tuple[str, str]] = Counter()
        self._serving = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @override
    def __enter__(self) -> Self:
        self._serving.start()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._serving.join()
        self.server_close()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a caller that resets its connection, as a process that ends does; print every other error."""
        if not isinstance(sys.exception(), ConnectionResetError):
            super().handle_error(request, client_address)

    def hides(self, event: bytes) -> bool:
        """Whether a line of a watch stays here."""
        if not self.hidden:
            return False
        told: dict[str, Any] = json.loads(event)
        return (told["type"], told["object"].get("kind")) in self.hidden


class _Forwarder(BaseHTTPRequestHandler):
    """One connection of a caller, and one to the API server behind it."""

    server: ApiProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _upstream: http.client.HTTPSConnection | None = None

    def _forward(self) -> None:
        self.server.calls[verb_and_kind(self.command, self.path)] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name in _PASSED_ON if (value := self.headers.get(name))}
        try:
            self._answer(self._ask(body, headers))
        except (OSError, http.client.HTTPException):  # either side went away
            self.close_connection = True

    def _ask(self, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        target = self.server.target
        if self._upstream is None:
            host, port = target.hostname or "", target.port or 443
            self._upstream = http.client.HTTPSConnection(host, port, context=self.server.tls, timeout=400)
        self._upstream.request(self.command, self.path, body or None, headers)
        return self._upstream.getresponse()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        if answer.status == http.HTTPStatus.FORBIDDEN:
            self.server.refused.append(f"{self.command} {self.path}")
        if self.command != "GET" and answer.status < http.HTTPStatus.BAD_REQUEST:
            self.server.written[verb_and_kind(self.command, self.path)] += 1
        watches = "watch" in parse_qs(urlsplit(self.path).query) and answer.status == http.HTTPStatus.OK
        text = b"" if watches else answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type") or "application/json")
        if watches:
            # Its end is the end of the connection.
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        if watches:
            for event in answer:
                if not self.server.hides(event):
                    self.wfile.write(event)

    @override
    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with suppress(OSError):
            super().finish()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815 - the names that http.server asks for

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
