"""The HTTP contract with kubelet, Prometheus and operator: /livez /readyz /metrics /status, and POST /intent.

Of a process for several processors /status is a list, /readyz says whether one is ready, and an intent is for those
that it names (`resources`), or for all. Answers come from memory. `outbox_spark` serves the same contract with it.

The operator asks by signed questions, Prometheus by a token; without a key, outside a cluster, only this machine may
ask. Probes are the kubelet's, and open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError
from outbox_core.proof import NONCE_HEADER, SIGNATURE_HEADER, is_same, sign_answer, sign_question
from outbox_core.report import Intent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_worker.observe.status import ProcessStatus, Progress
    from outbox_worker.settings import Settings

_LARGEST_BODY: Final = 64 * 1024
_SLOWEST_CLIENT: Final = 10.0
_LOOK_SECONDS: Final = 1.0
"""Between two looks of the thread at whether it shall end; five a second took a fifth of an idle worker's CPU time."""

GUARDED: Final = frozenset({"/status", "/intent", "/metrics"})


@dataclass(frozen=True, slots=True)
class Question:
    """A request and its credentials; `token` is a bearer's, `client` the address it comes from."""

    method: str
    path: str
    client: str
    body: bytes = b""
    nonce: str = ""
    signature: str = ""
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """What this process knows about those who may ask.

    Attributes:
        key: of the resource; empty: none was mounted.
        metrics_hash: SHA-256 of the token that may read /metrics, in hexadecimal; empty: no token may.

    """

    key: bytes = field(repr=False)
    pod_uid: str
    metrics_hash: str

    def admits(self, question: Question) -> bool:
        """Tell whether the question may be answered."""
        if question.path not in GUARDED:
            return True
        if not self.key:
            return _is_this_machine(question.client)
        return self._is_signed(question) or (question.path == "/metrics" and self._has_token(question))

    def sign(self, question: Question, answer: bytes) -> str | None:
        """Sign the answer to a signed question; None for any other."""
        return sign_answer(self.key, question.signature, answer) if self._is_signed(question) else None

    def _is_signed(self, question: Question) -> bool:
        if not (self.key and question.nonce):
            return False
        asked = question.method, question.path, question.body
        return is_same(question.signature, sign_question(self.key, self.pod_uid, question.nonce, *asked))

    def _has_token(self, question: Question) -> bool:
        shown = hashlib.sha256(question.token.encode(errors="replace")).hexdigest()
        return bool(question.token) and is_same(shown, self.metrics_hash)


def read_access(settings: Settings) -> Access:
    """Read the key where the operator mounts it.

    Raises:
        ConfigurationError: it is there and cannot be read, or is empty: without it every client could ask.

    """
    try:
        key = settings.key.read_bytes().strip()
        if not key:
            raise ConfigurationError(f"{settings.key} is empty: delete its Secret, the operator makes it again")
    except FileNotFoundError:
        key = b""
    except OSError as err:
        raise ConfigurationError(f"cannot read {settings.key}: {err.strerror}") from err
    return Access(key, settings.pod_uid, settings.metrics_hash)


def _is_this_machine(client: str) -> bool:
    address = ip_address(client.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


class HealthServer:
    """Serves in threads of its own until `close`."""

    def __init__(
        self, address: tuple[str, int], *, access: Access, statuses: Sequence[ProcessStatus], progress: Progress
    ) -> None:
        """Bind host and port: an empty host is every interface, port 0 takes a free one. One status a processor.

        Raises:
            ConfigurationError: the port is taken, or this machine does not have the address.

        """
        self._access = access
        self._statuses = statuses
        self._progress = progress
        host, port = address
        try:
            self._server = _Server(address, self)
        except OSError as err:
            where = f" of {host}" if host else ""
            raise ConfigurationError(
                f"port {port}{where} for status cannot be opened ({err.strerror}); choose another"
            ) from err
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer nothing more."""
        with contextlib.suppress(OSError):  # it wakes the thread; where it does not, the look is waited for
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)

    def answer(self, question: Question) -> tuple[HTTPStatus, str, bytes, str | None]:
        """Answer clients that may ask, with a signature where the question has one."""
        if not self._access.admits(question):
            text = b"only the operator may ask here; /metrics takes a bearer token too (worker/README.md)\n"
            return HTTPStatus.UNAUTHORIZED, "text/plain", text, None
        found = self.get(question.path) if question.method == "GET" else self.post(question.path, question.body)
        return *found, self._access.sign(question, found[2])

    def get(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Answer a GET: status, content type, body."""
        match path:
            case "/livez":
                late = self._progress.overdue()
                text = f"no progress: {', '.join(late)}\n" if late else "alive\n"
                return (HTTPStatus.SERVICE_UNAVAILABLE if late else HTTPStatus.OK), "text/plain", text.encode()
            case "/readyz":
                reports = [status.report() for status in self._statuses]
                text = "".join(f"{report.state.value}: {report.reason.value}\n" for report in reports)
                is_ready = any(status.is_ready for status in self._statuses)
                return HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", text.encode()
            case "/status":
                text = ",".join(status.report().model_dump_json(by_alias=True) for status in self._statuses)
                text = f"[{text}]" if self._statuses[0].is_shared else text
                return HTTPStatus.OK, "application/json", text.encode()
            case "/metrics":
                # Only the first scrape pays for Prometheus' client, and a process that is never asked does not.
                from outbox_worker.observe.telemetry import render

                return HTTPStatus.OK, "text/plain; version=0.0.4", render(self._statuses)
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", b"/livez /readyz /metrics /status, POST /intent\n"

    def post(self, path: str, body: bytes) -> tuple[HTTPStatus, str, bytes]:
        """Answer a POST."""
        if path != "/intent":
            return HTTPStatus.NOT_FOUND, "text/plain", b"POST /intent\n"
        try:
            asked = json.loads(body)
            intent, names = Intent(asked["intent"]), asked.get("resources")
            told = [each for each in self._statuses if names is None or each.resource in names]
        except (ValueError, KeyError, TypeError):
            known = ", ".join(each.value for each in Intent)
            return HTTPStatus.BAD_REQUEST, "text/plain", f'send {{"intent": …}} with one of {known}\n'.encode()
        for status in told:
            status.intent = intent
        return HTTPStatus.OK, "application/json", json.dumps({"intent": intent.value}).encode()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = _SLOWEST_CLIENT
    server_version = "outbox"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer from memory."""
        self._answer(b"")

    def do_POST(self) -> None:
        """Take an intent."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LARGEST_BODY:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", b"a short body with Content-Length, please\n")
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        question = Question(
            method=self.command,
            path=self.path.partition("?")[0],
            client=self.client_address[0],
            body=body,
            nonce=self.headers.get(NONCE_HEADER, ""),
            signature=self.headers.get(SIGNATURE_HEADER, ""),
            token=token.strip() if scheme.lower() == "bearer" else "",
        )
        self._send(*self.server.health.answer(question))

    def _send(self, status: HTTPStatus, content_type: str, body: bytes, signature: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if signature is not None:
            self.send_header(SIGNATURE_HEADER, signature)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Probes are not news."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, address: tuple[str, int], health: HealthServer) -> None:
        self.health = health
        if address[0]:
            self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Handler)

    @override
    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is not news either."""
