"""Target `http`: each message is one POST, several at once, those of one key one after another. AtLeastOnce.

What is posted again has the same `Idempotency-Key`. A message that the receiver refuses is named, and with it those
that wait behind it; what the receiver took beside them is not posted again by this process.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import socket
import ssl
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import TakenMessages
from outbox_core.progress.barrier import key_of
from outbox_core.report import Reason
from outbox_core.spec import Blocks, Mode, PartitionKey
from outbox_worker.targets.secret_files import build_tls, invalid_secret, read_files
from outbox_worker.targets.values import TRACE_HEADERS, check_key, read_trace
from outbox_worker.waiting import wait_ready

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator
    from pathlib import Path

    from _typeshed import WriteableBuffer

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Delivery
    from outbox_core.spec.target import HttpTarget
    from outbox_worker.settings import Settings


_LONGEST_BODY: Final = 65_536
"""Of an answer, what is read so that the connection can be kept."""
_UNCHANGED: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class _Secret(NamedTuple):
    token: str | None = None
    keys: tuple[bytes, ...] = ()
    authority: str | None = None


@dataclass(slots=True)
class _Attempt:
    """One attempt at a batch, shared by its threads. `sequences`: messages, and what waits behind each if it fails."""

    secret: _Secret
    sequences: Iterator[list[tuple[Message, Hashable]]]
    blocked: set[Hashable] = field(default_factory=set)
    taken: list[Message] = field(default_factory=list)
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)
    fault: BaseException | None = None
    stopped: bool = False


class _TimedReader(RawIOBase):
    """Reads what a socket receives until its time is over, however often a byte comes: `http.client` waits for each."""

    def __init__(self, connection: socket.socket, received: RawIOBase) -> None:
        """Read `received`, the file of a socket, for as long as the socket's own timeout."""
        self._connection, self._received = connection, received
        self._until = time.monotonic() + (connection.gettimeout() or 0.0)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: WriteableBuffer) -> int | None:
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)
        return self._received.readinto(buffer)

    @override
    def close(self) -> None:
        self._received.close()
        super().close()


class _FinalAnswer(HTTPResponse):
    """The answer behind all interim ones (RFC 9110, section 15.2): `http.client` skips status 100 alone.

    All of them and the body have the time of one.
    """

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = BufferedReader(_TimedReader(sock, self.fp.detach()))

    @override
    def begin(self) -> None:
        super().begin()
        while 100 < self.status < 200 and self.status != 101:
            self.headers = None  # type: ignore[assignment]  # what was read; with it, `begin` reads no more
            super().begin()


class HttpSink(OutsideTransaction):
    """Posts the messages of one processor."""

    def __init__(self, target: HttpTarget, directory: Path, delivery: Delivery) -> None:
        """Keep the settings; `directory` is the mounted Secret of `target.connection`. Nothing is opened."""
        self._target, self._delivery = target, delivery
        self._directory = directory if target.connection is not None else None
        self._key = delivery.message_key or PartitionKey()
        self._url = urlsplit(target.url)
        self._where = f"{self._url.scheme}://{self._url.netloc}"
        self._secret: _Secret | None = None
        self._context: ssl.SSLContext | None = None
        self._connections: list[HTTPConnection] = []
        self._taken = TakenMessages()

    @override
    def check(self) -> None:
        """Look at Secret and key. The receiver itself is asked when there is something to post."""
        check_key(self._key, "http")
        build_tls(_read_secret(self._directory).authority, "http")

    @override
    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        messages = self._taken.left_of(batch, epoch)
        sequences = self._plan(messages, held=batch.is_retried)
        attempt = _Attempt(_read_secret(self._directory), iter(sequences))
        try:
            self._post_all(attempt, min(self._target.parallelism, len(sequences)))
        except BaseException:
            self._taken.add(batch, attempt.taken)
            raise
        return self._taken.conclude(batch, messages, attempt.failed)

    def _plan(self, messages: list[Message], *, held: bool) -> list[list[tuple[Message, Hashable]]]:
        """Divide messages into sequences, each posted in its order."""
        ordered, blocks = self._delivery.mode is Mode.ORDERED, self._delivery.blocking
        sequences: dict[Hashable, list[tuple[Message, Hashable]]] = {}
        for message in messages:
            key = key_of(message, self._key)
            sequence: Hashable = message[:2] if key is None else key
            if self._target.parallelism == 1 or (key is None and ordered):
                sequence = None
            # What is named behind one that fails must be of its key where only keys wait: it would be blamed.
            behind: Hashable = (sequence,) if blocks is Blocks.PARTITION and not held else key
            if blocks is Blocks.NOTHING or self._delivery.mode is Mode.COMPETING:
                behind = None
            sequences.setdefault(sequence, []).append((message, behind))
        return list(sequences.values())

    def _post_all(self, attempt: _Attempt, parallel: int) -> None:
        if attempt.secret != self._secret:
            self.close()
            self._context, self._secret = build_tls(attempt.secret.authority, "http"), attempt.secret
        seconds = self._target.request_timeout.total_seconds()
        make = HTTPConnection if self._url.scheme == "http" else partial(HTTPSConnection, context=self._context)
        self._connections += [make(self._url.netloc, timeout=seconds) for _ in range(parallel - len(self._connections))]
        for connection in self._connections:
            connection.response_class = _FinalAnswer
        threads = [
            Thread(target=self._work, args=(attempt, each), daemon=True) for each in self._connections[:parallel]
        ]
        started: list[Thread] = []
        try:
            for thread in threads:
                with contextlib.suppress(RuntimeError):  # this process may have no more of them: the others do it all
                    thread.start()
                    started.append(thread)
            for thread in started:
                thread.join()
        except BaseException:
            attempt.stopped = True
            while self._connections:  # their threads see an error, and close them
                with contextlib.suppress(OSError, TypeError):
                    socket.socket.shutdown(self._connections.pop().sock, socket.SHUT_RDWR)
            raise
        if not started and threads:
            raise TransientError(
                "this process cannot start a thread to post with: raise its limit (the pod's process ids, ulimit -u)",
                reason=Reason.TARGET_UNAVAILABLE,
            )
        if attempt.fault is not None:
            raise attempt.fault

    def _work(self, attempt: _Attempt, connection: HTTPConnection) -> None:
        """Post one sequence after another, until none is left or the target fails. Runs in a thread of its own."""
        try:
            for sequence in attempt.sequences:
                for message, behind in sequence:
                    if attempt.stopped:
                        return
                    self._post(attempt, connection, message, behind)
        except BaseException as err:  # noqa: BLE001 - raised again in the main thread
            attempt.fault, attempt.stopped = attempt.fault or err, True
            connection.close()

    def _post(self, attempt: _Attempt, connection: HTTPConnection, message: Message, behind: Hashable) -> None:
        try:
            if behind is not None and behind in attempt.blocked:
                raise HandlerError("not posted: it waits behind one that failed", reason=Reason.MESSAGE_REJECTED)  # noqa: TRY301
            self._exchange(attempt, connection, *build_request(message, self._target))
            attempt.taken.append(message)
        except HandlerError as err:
            attempt.failed[message.checkpoint] = err
            attempt.blocked.add(behind)

    def _exchange(self, attempt: _Attempt, connection: HTTPConnection, headers: dict[str, str], body: bytes) -> None:
        """Send one request; raise what its answer means."""
        token, keys, _ = attempt.secret
        headers |= sign(keys, headers["Idempotency-Key"], int(time.time()), body)
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answer, content = self._ask(attempt, connection, headers, body)
        except ssl.SSLCertVerificationError as err:
            raise ConfigurationError(
                f"{self._where}: its certificate is not trusted ({err.verify_message}); correct it there, or put the "
                "right CA into `ca.crt` of the Secret of target.http.connection",
                reason=Reason.CONNECTION_SECRET_INVALID,
            ) from err
        except (OSError, HTTPException, ValueError, OverflowError) as err:  # the last two: of a host, a port
            why = str(err) or type(err).__name__
            if isinstance(err, BadStatusLine) and not isinstance(err, OSError):
                hint = "; if it speaks TLS, write https in target.http.url" if self._url.scheme == "http" else ""
                why = f"what it sent is no HTTP answer{hint}: {why}"
            raise TransientError(
                f"{self._where} did not answer ({_shorten(why, token)}); it is tried again",
                reason=Reason.TARGET_UNAVAILABLE,
            ) from err
        said = _shorten(content.decode(errors="replace"), token)
        asked = answer.getheader("Retry-After", "")
        wait = parse_retry_after(asked, datetime.now(UTC))
        # As it came: the seconds up to a date would be others at each attempt, and a status would change with them.
        until = "" if wait is None else f" (Retry-After: {_shorten(asked, token)})"
        if error := classify_answer(
            answer.status, wait, f"{self._where} answered {answer.status}{until} {said}".rstrip()
        ):
            raise error

    def _ask(
        self, attempt: _Attempt, connection: HTTPConnection, headers: dict[str, str], body: bytes
    ) -> tuple[HTTPResponse, bytes]:
        """Send one request, again where the receiver ends a connection that was kept: it may not have seen it."""
        while True:
            if connection.sock is not None and wait_ready(0, [connection.sock]):
                connection.close()  # the receiver ended it meanwhile
            if is_new := connection.sock is None:
                connection.connect()
            if attempt.stopped:
                raise InterruptedError("the batch is given up")
            try:
                return self._ask_once(connection, headers, body)
            except ConnectionError:
                if is_new or attempt.stopped:
                    raise
                connection.close()

    def _ask_once(self, connection: HTTPConnection, headers: dict[str, str], body: bytes) -> tuple[HTTPResponse, bytes]:
        """Send one request and return its answer with the beginning of the body, as far as that came."""
        path = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        connection.sock.settimeout(self._target.request_timeout.total_seconds())  # reading the last answer changed it
        unsent: OSError | None = None
        try:
            connection.request("POST", path, body, headers)
        except OSError as err:
            if not wait_ready(0, [connection.sock]):
                raise
            unsent = err  # a message that is too large, for example, is refused before all of it is there
        content = b""
        with connection.getresponse() as answer:
            try:
                while not answer.isclosed() and len(content) < _LONGEST_BODY:
                    # No more than is there: a read that the time ends gives nothing of what it had.
                    ready = len(answer.fp.peek()) if content else 1
                    content += answer.read(max(1, min(ready, _LONGEST_BODY - len(content))))
            except (OSError, HTTPException, ValueError):  # the status counts: repeated, it would be taken twice
                connection.close()
            if unsent or not answer.isclosed():  # there is more: unread, it would be taken for the next answer
                connection.close()
        if unsent and answer.status < 400:
            raise unsent
        return answer, content


def _shorten(text: str, token: str | None) -> str:
    """Return what a receiver said as one short line, without our token."""
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text.replace(token or "\0", "***")[:200]


def encode_header(value: str) -> str:
    """Percent-encode what CloudEvents asks for in headers: space, `"`, `%`, and all that is not printable ASCII."""
    return quote(value, safe=_UNCHANGED)


def build_request(message: Message, target: HttpTarget) -> tuple[dict[str, str], bytes]:
    """Build headers and body, but for what the Secret adds; HandlerError: the message cannot be a CloudEvent."""
    attributes, data = _attributes(message, target), message.data
    headers = {name: attributes[name] for name in TRACE_HEADERS if name in attributes}
    headers["Idempotency-Key"] = encode_header(message.message_id)
    media = "application/json" if (is_json := _is_json(data)) else "text/plain; charset=utf-8"
    if target.content_mode == "Binary":
        headers |= {f"ce-{name}": encode_header(value) for name, value in attributes.items()}
        return headers | ({} if data is None else {"Content-Type": media}), (data or "").encode()
    headers["Content-Type"] = "application/cloudevents+json; charset=utf-8"
    if data is None:
        return headers, json.dumps(attributes).encode()
    head = json.dumps(attributes | {"datacontenttype": media})[:-1]
    # The payload's own text: parsed and written again, its numbers could change.
    return headers, f'{head}, "data": {data if is_json else json.dumps(data)}}}'.encode()


def _attributes(message: Message, target: HttpTarget) -> dict[str, str]:
    row = {"messageType": message.message_type, "publicationId": message.publication_id}
    row["partitionKey"] = message.partition_key
    found = {
        "specversion": "1.0",
        "id": message.message_id,
        "source": re.sub(r"\{(\w+)\}", lambda place: quote(row[place[1]] or "", safe=""), target.source),
        "type": re.sub(r"\{(\w+)\}", lambda place: row[place[1]] or "", target.type),
        "time": None if message.scheduled is None else message.scheduled.isoformat(),
        "partitionkey": message.partition_key,
        **read_trace(message.metadata),
    }
    if empty := [name for name in ("id", "source", "type") if not found[name]]:
        why = f"its {empty[0]} would be empty; fill the column of its row, or set target.http.source and type"
        raise HandlerError(f"{message.pair} cannot be a CloudEvent: {why}", reason=Reason.MESSAGE_REJECTED)
    return {name: value for name, value in found.items() if value}


def _is_json(text: str | None) -> bool:
    try:
        # NaN and Infinity are not JSON; an integer may have more digits than `int` takes.
        json.loads(text or "", parse_constant=int, parse_int=float)
    except (ValueError, RecursionError):
        return False
    return True


def sign(keys: Iterable[bytes], identity: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Sign as Standard Webhooks asks, with each key; `timestamp` is the attempt's, in seconds since 1970."""
    digests = [hmac.digest(key, f"{identity}.{timestamp}.".encode() + body, "sha256") for key in keys]
    told = {"webhook-id": identity, "webhook-timestamp": str(timestamp)}
    told["webhook-signature"] = " ".join(f"v1,{b64encode(digest).decode()}" for digest in digests)
    return told if digests else {}


def parse_retry_after(value: str, now: datetime) -> float | None:
    """Read the header Retry-After, seconds or a date, as seconds from now; None: it is neither."""
    if value.isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())


def classify_answer(status: int, retry_after: float | None, what: str) -> OutboxError | None:
    """Say whose fault an answer is: None: taken; HandlerError: the message's; else the target's. `what` describes it.

    Of 4xx four are the target's: 401 (our token), 408, 425 and 429 (another time the same message may be taken).
    """
    classes = (f"Http{status}",)
    if 200 <= status < 300:
        return None
    if 400 <= status < 500 and status not in {401, 408, 425, 429}:
        return HandlerError(what, reason=Reason.MESSAGE_REJECTED, classes=classes, retry_after=retry_after)
    reason = Reason.AUTHENTICATION_FAILED if status == 401 else Reason.TARGET_UNAVAILABLE
    hints = {3: "redirects are not followed, correct target.http.url; ", 4: "correct `token` in the target's Secret; "}
    hint = hints.get(status // 100, "") if status == 401 or status < 400 else ""
    return TransientError(f"{what}; {hint}it is tried again", reason=reason, classes=classes, retry_after=retry_after)


def _read_secret(directory: Path | None) -> _Secret:
    if directory is None:
        return _Secret()
    values = read_files(directory, "token", "signingKey", "ca.crt", target="http")
    if (token := values["token"]) is not None and not (token.isascii() and token.isprintable()):
        raise invalid_secret("`token` is not one line of printable ASCII", "http")
    try:
        keys = [b64decode(key.removeprefix("whsec_"), validate=True) for key in (values["signingKey"] or "").split()]
    except ValueError:
        keys = [b""]
    if any(len(key) < 24 for key in keys):
        raise invalid_secret("`signingKey` is not base64 of 24 bytes or more (try `openssl rand -base64 32`)", "http")
    return _Secret(token, tuple(keys), values["ca.crt"])


def build(target: HttpTarget, config: ProcessorConfig, settings: Settings) -> HttpSink:
    """Build the target."""
    return HttpSink(target, settings.target, config.delivery)
