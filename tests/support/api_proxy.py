"""Stands between an operator and the real API server, and keeps from its watches what a test says."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

_PASSED_ON = ("Authorization", "Content-Type", "Accept", "User-Agent")


class ApiProxy(ThreadingHTTPServer):
    """Forwards every call as it is, with its caller's own token; use as a context manager.

    Attributes:
        hidden: (type, kind) of the events that no watch delivers, for example ("DELETED", "Pod").
        refused: the calls that were answered with 403.

    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarder)
        self.target = urlsplit(cluster.server)
        self.tls = ssl.create_default_context(cafile=cluster.authority)
        self.hidden: set[tuple[str, str]] = set()
        self.refused: list[str] = []
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

    def hides(self, event: bytes) -> bool:
        """Whether a line of a watch stays here."""
        if not self.hidden:
            return False
        told: dict[str, Any] = json.loads(event)
        return (told["type"], told["object"].get("kind")) in self.hidden


class _Forwarder(BaseHTTPRequestHandler):
    """One connection a call, as HTTP/1.0 has it: its end is the end of the answer."""

    server: ApiProxy

    def _forward(self) -> None:
        target = self.server.target
        host, port = target.hostname or "", target.port or 443
        upstream = http.client.HTTPSConnection(host, port, context=self.server.tls, timeout=400)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name in _PASSED_ON if (value := self.headers.get(name))}
        with suppress(OSError):  # either side went away
            upstream.request(self.command, self.path, body or None, headers)
            self._answer(upstream.getresponse())
        upstream.close()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        if answer.status == http.HTTPStatus.FORBIDDEN:
            self.server.refused.append(f"{self.command} {self.path}")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type") or "application/json")
        self.end_headers()
        if "watch" not in parse_qs(urlsplit(self.path).query):
            self.wfile.write(answer.read())
            return
        for event in answer:
            if not self.server.hides(event):
                self.wfile.write(event)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815 - the names that http.server asks for

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
