"""One connection to the leader of one stream, by RabbitMQ's stream protocol over a plain socket.

Made for one thing: write a whole batch at once while reading what the broker says, and return when every message is
confirmed, which the broker does once a majority of the stream's replicas has it. One thread uses it. After any error it
is closed and a new one is made: nothing is resumed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.amqp.broker import build_login_refused, build_vhost_refused
from outbox_worker.targets.amqp.wire import CONNECT_SECONDS, HEARTBEAT_SECONDS, Wire
from outbox_worker.targets.streams import frames
from outbox_worker.targets.streams.frames import U8, U16, U32, U64, Code, Key, Received

if TYPE_CHECKING:
    from outbox_worker.targets.amqp.broker import BrokerAddress

_NO_LIMIT: Final = 2**31 - 1
"""Bytes of a frame: what the broker's limit 0 means."""
_MOST_PUBLISHERS: Final = 200
"""Of 256 that a connection can have."""


def connect_to_leader(address: BrokerAddress, stream: str, *, name: str) -> StreamConnection:
    """Open a connection to the node that leads the stream, which need not be the one that the address is of.

    Raises:
        TransientError: a broker cannot be reached, refuses the login, or has no such stream.
        ConfigurationError: virtual host or TLS settings are wrong.

    """
    first = StreamConnection(address, stream, name=name)
    try:
        leader = first.find_leader()
        if leader == first.advertised:
            return first
        first.close()
        host, port = leader
        try:
            second = StreamConnection(replace(address, host=host, port=port), stream, name=name)
        except TransientError as err:
            raise TransientError(
                f"RabbitMQ at {address} says that stream {stream!r} is led by the node at {host}:{port}: {err}. "
                "Workers must reach each node at the address that it advertises (advertised_host and advertised_port "
                "of its stream plugin)",
                reason=err.reason,
            ) from err
    except BaseException:
        first.close()
        raise
    if second.advertised != leader:
        second.close()
        raise TransientError(
            f"RabbitMQ says that stream {stream!r} is led by the node at {host}:{port}, and another node answers "
            "there; let each node advertise an address of its own (advertised_host, advertised_port)",
            reason=Reason.TARGET_UNAVAILABLE,
        )
    return second


class StreamConnection:
    """An open connection to one node."""

    def __init__(self, address: BrokerAddress, stream: str, *, name: str) -> None:
        """Connect and log in; `name` is for the broker's list of connections.

        Raises:
            TransientError: the broker cannot be reached, or refuses the login.
            ConfigurationError: virtual host or TLS settings are wrong.

        """
        self._address = address
        self._stream = stream
        self._answers: dict[int, Received] = {}
        self._tuned = False
        self._requests = 0
        self._publishers: dict[str, int] = {}
        self.outstanding: set[tuple[int, int]] = set()
        """Publisher and number of each message that was published and is not confirmed."""
        self.frame_max = _NO_LIMIT
        self.advertised = ("", 0)
        """Where this node says that it is."""
        self._wire = Wire(address, beat=frames.frame(Key.HEARTBEAT), take=self._take_frames)
        try:
            self._log_in(name)
        except BaseException:
            self.close()
            raise

    def _log_in(self, name: str) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        who = {"product": "outbox-operator", "connection_name": name}
        self._ask(Key.PEER_PROPERTIES, frames.properties(who), deadline=deadline)
        self._ask(Key.SASL_HANDSHAKE, deadline=deadline)
        login = f"\0{self._address.username}\0{self._address.password}".encode()
        self._ask(Key.SASL_AUTHENTICATE, frames.string("PLAIN"), U32.pack(len(login)), login, deadline=deadline)
        self._wire.exchange(b"", deadline, lambda: self._tuned)
        tuned = frames.frame(Key.TUNE, U32.pack(self.frame_max), U32.pack(int(self._wire.heartbeat)))
        opening = self._ask(Key.OPEN, frames.string(self._address.vhost), deadline=deadline, before=tuned)
        about = opening.properties()
        port = about.get("advertised_port", "")
        self.advertised = (about.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    def find_leader(self) -> tuple[str, int]:
        """Return host and port that the stream's leader advertises.

        Raises:
            TransientError: there is no such stream, or it has no leader now.

        """
        streams = U32.pack(1) + frames.string(self._stream)  # a list of one
        found = self._ask(Key.METADATA, streams, deadline=self._soon(), coded=False)
        brokers: dict[int, tuple[str, int]] = {}
        for _ in range(found.number(U32)):
            reference = found.number(U16)
            brokers[reference] = (found.string(), found.number(U32))
        found.number(U32)
        found.string()
        code, leader = found.number(U16), found.number(U16)
        self._check(code)
        if leader not in brokers:
            raise self._wire.unavailable(f"has no leader for stream {self._stream!r} now")
        return brokers[leader]

    def declare(self, reference: str) -> tuple[int, int]:
        """Return the publisher of this name, and the highest number that the stream has of it; no name: no numbers.

        Raises:
            OutboxError: the broker refuses it.

        """
        found = self._publishers.get(reference)
        if found is None:
            found = len(self._publishers)
            if found >= _MOST_PUBLISHERS:
                raise self._wire.unavailable("was asked for too many publishers on one connection, which is made anew")
            names = frames.string(reference) + frames.string(self._stream)
            self._ask(Key.DECLARE_PUBLISHER, U8.pack(found), names, deadline=self._soon())
            self._publishers[reference] = found
            if reference:
                answer = self._ask(Key.QUERY_PUBLISHER_SEQUENCE, names, deadline=self._soon(), coded=False)
                code = answer.number(U16)
                # The broker tells it to who may read, and it is only written to the log.
                if code != Code.ACCESS_REFUSED:
                    self._check(code)
                    return found, answer.number(U64)
        return found, 0

    def publish(self, publisher: int, entries: list[tuple[int, bytes]], *, deadline: float) -> None:
        """Write one frame of messages with their numbers, and take what the broker says meanwhile."""
        self.outstanding.update(zip(repeat(publisher), map(itemgetter(0), entries)))
        self._wire.exchange(frames.publish(publisher, entries), deadline, lambda: True)

    def await_confirms(self, *, deadline: float) -> None:
        """Return when the broker has confirmed everything that was published."""
        self._wire.exchange(b"", deadline, lambda: not self.outstanding)

    def keep_alive(self) -> None:
        """Answer heartbeats.

        Raises:
            TransientError: the broker closed the connection.

        """
        self._wire.exchange(b"", self._soon(), lambda: True)

    def close(self) -> None:
        """Drop the connection; what was not confirmed may or may not be in the stream."""
        self._wire.close()

    def _soon(self) -> float:
        return time.monotonic() + CONNECT_SECONDS

    def _ask(self, key: Key, *fields: bytes, deadline: float, before: bytes = b"", coded: bool = True) -> Received:
        """Send a request, wait for its answer and check that it is yes; `coded`: it has a code."""
        self._requests += 1
        request = self._requests
        sent = before + frames.frame(key, U32.pack(request), *fields)
        self._wire.exchange(sent, deadline, lambda: request in self._answers)
        found = self._answers.pop(request)
        if coded:
            self._check(found.number(U16))
        return found

    def _take_frames(self, view: bytes) -> int:
        start = 0
        if view.startswith(b"AMQP"):
            raise self._wire.unavailable(
                "speaks AMQP here, not the protocol of streams: their port is 5552, or 5551 for TLS"
            )
        while len(view) - start >= frames.SIZE.size:
            (size,) = frames.SIZE.unpack_from(view, start)
            begin, end = start + frames.SIZE.size, start + frames.SIZE.size + size
            if len(view) < end:
                break
            try:
                self._dispatch(frames.read_frame(view[begin:end]))
            except frames.UnreadableError as err:
                raise self._wire.unavailable("sent a frame that cannot be read") from err
            start = end
        return start

    def _dispatch(self, found: Received) -> None:
        if found.is_answer:
            self._answers[found.number(U32)] = found
            return
        match found.key:
            case Key.PUBLISH_CONFIRM:
                publisher = found.number(U8)
                self.outstanding.difference_update(zip(repeat(publisher), found.longs()))
            case Key.PUBLISH_ERROR:
                for form in (U8, U32, U64):  # publisher, how many messages, number of the first
                    found.number(form)
                raise self._refused(found.number(U16))
            case Key.METADATA_UPDATE:
                code, stream = found.number(U16), found.string()
                if stream == self._stream:
                    raise self._wire.unavailable(
                        f"says that stream {stream!r} has changed ({frames.describe_code(code)})"
                    )
            case Key.TUNE:
                self.frame_max = found.number(U32) or _NO_LIMIT
                self._wire.heartbeat = float(min(found.number(U32) or HEARTBEAT_SECONDS, HEARTBEAT_SECONDS))
                self._tuned = True
            case Key.CLOSE:
                found.number(U32)
                code, why = found.number(U16), found.string()
                raise self._wire.unavailable(f"closed the connection ({frames.describe_code(code)}: {why})")
            case _:
                return  # heartbeats, and what later versions say

    def _check(self, code: int) -> None:
        if code != Code.OK:
            raise self._refused(code)

    def _refused(self, code: int) -> OutboxError:
        where = f"RabbitMQ at {self._address}"
        match code:
            case Code.AUTHENTICATION_FAILED | Code.SASL_ERROR | Code.REFUSED_FROM_ELSEWHERE:
                return build_login_refused(self._address)
            case Code.VIRTUAL_HOST_REFUSED:
                return build_vhost_refused(self._address)
            case Code.NO_SUCH_STREAM:
                return TransientError(
                    f"{where} has no stream {self._stream!r}; declare it (a queue of type stream), or correct "
                    "target.rabbitmqStream.stream",
                    reason=Reason.MESSAGE_UNROUTABLE,
                )
            case Code.ACCESS_REFUSED:
                return ConfigurationError(
                    f"{where} does not let user {self._address.username} publish to stream {self._stream!r}; grant the "
                    "user write permission",
                    reason=Reason.PERMISSION_DENIED,
                )
            case Code.PRECONDITION_FAILED:
                return self._wire.unavailable(
                    f"takes no publisher for stream {self._stream!r} ({frames.describe_code(code)}), as while it has "
                    "an alarm; free its disk or memory"
                )
            case _:
                return self._wire.unavailable(
                    f"refused a request about {self._stream!r} ({frames.describe_code(code)})"
                )
