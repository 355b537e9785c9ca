"""One connection and channel to RabbitMQ, in confirm mode, over a plain socket. The frames are pamqp's.

Made for one thing: write a whole batch at once while reading what the broker says, and return when every message is
answered for. One thread uses it. After any error it is closed and a new one is made: nothing is resumed, because what
was not confirmed has to be sent again anyway.
"""

from __future__ import annotations

import select
import ssl
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pamqp import commands, exceptions, frame, header, heartbeat

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.amqp.broker import build_unavailable, open_socket
from outbox_worker.targets.amqp.confirm import ConfirmTracker, read_ack
from outbox_worker.targets.amqp.encoder import CHANNEL

if TYPE_CHECKING:
    from outbox_worker.targets.amqp.broker import BrokerAddress

_CONNECT_SECONDS: Final = 10.0
_HEARTBEAT_SECONDS: Final = 60
_FRAME_MAX: Final = 131_072
_BLOCKED_PATIENCE: Final = 10.0
"""How long a batch waits for a broker that blocks publishers (disk or memory alarm) before it says so in status."""
_SEND_PIECE: Final = 262_144
_FRAME: Final = struct.Struct(">BHI")
_CAPABILITIES: Final[dict[str, Any]] = {
    "publisher_confirms": True,
    "basic.nack": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}
_Method = TypeVar("_Method")


@dataclass(frozen=True, slots=True)
class Returned:
    """A mandatory message that no queue took, with the headers that it was published with."""

    reply: str
    exchange: str
    routing_key: str
    headers: dict[str, Any]


class AmqpConnection:
    """An open channel in confirm mode."""

    def __init__(self, address: BrokerAddress, *, name: str) -> None:
        """Connect, log in and switch confirms on.

        Raises:
            TransientError: the broker cannot be reached, or refuses the login.
            ConfigurationError: virtual host or TLS settings are wrong.

        """
        self._address = address
        self._received = bytearray()
        self._inbox: list[Any] = []
        self._error: OutboxError | None = None
        self._last_sent = self._last_received = time.monotonic()
        self._heartbeat = float(_HEARTBEAT_SECONDS)
        self.frame_max = _FRAME_MAX
        self.blocked: str | None = None
        self.confirms = ConfirmTracker()
        self.returned: list[Returned] = []
        self._returning: commands.Basic.Return | None = None
        self._socket = open_socket(address, _CONNECT_SECONDS)
        try:
            self._log_in(name)
        except BaseException:
            self._socket.close()
            raise

    def _log_in(self, name: str) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        login = f"\0{self._address.username}\0{self._address.password}"
        self.exchange(header.ProtocolHeader().marshal(), deadline)
        self._call(None, commands.Connection.Start, deadline, channel=0)
        properties: dict[str, Any] = {
            "product": "outbox-operator",
            "connection_name": name,
            "capabilities": _CAPABILITIES,
        }
        start = commands.Connection.StartOk(client_properties=properties, mechanism="PLAIN", response=login)
        tune = self._call(start, commands.Connection.Tune, deadline, channel=0)
        self.frame_max = min(tune.frame_max or _FRAME_MAX, _FRAME_MAX)
        seconds = min(tune.heartbeat or _HEARTBEAT_SECONDS, _HEARTBEAT_SECONDS)
        self._heartbeat = float(seconds)
        tuned = commands.Connection.TuneOk(channel_max=CHANNEL, frame_max=self.frame_max, heartbeat=seconds)
        self.exchange(frame.marshal(tuned, 0), deadline)
        opening = commands.Connection.Open(virtual_host=self._address.vhost)
        self._call(opening, commands.Connection.OpenOk, deadline, channel=0)
        self._call(commands.Channel.Open(), commands.Channel.OpenOk, deadline, channel=CHANNEL)
        self._call(commands.Confirm.Select(), commands.Confirm.SelectOk, deadline, channel=CHANNEL)

    def _call(self, method: Any, answer: type[_Method], deadline: float, *, channel: int) -> _Method:
        """Send a method and wait for its answer."""
        data = frame.marshal(method, channel) if method is not None else b""
        self.exchange(data, deadline, until=answer)
        found = next(each for each in self._inbox if isinstance(each, answer))
        self._inbox.clear()
        return found

    def publish(self, data: bytes, *, deadline: float) -> None:
        """Write frames of messages (their tags were taken from `confirms`) and take what the broker says meanwhile."""
        self.exchange(data, deadline)

    def await_confirms(self, last: int, *, deadline: float) -> None:
        """Return when every message published up to this delivery tag is answered for."""
        self.exchange(b"", deadline, confirmed=last)

    def keep_alive(self) -> None:
        """Send and take heartbeats; call it every few seconds while idle.

        Raises:
            OutboxError: the broker closed the connection or is silent.

        """
        self.exchange(b"", time.monotonic() + _CONNECT_SECONDS)

    def close(self) -> None:
        """Say good-bye if that needs no waiting, and close. Never raises."""
        try:
            closing = commands.Connection.Close(reply_code=200, reply_text="", class_id=0, method_id=0)
            self._socket.send(frame.marshal(closing, 0))
        except (OSError, ValueError):
            pass  # it is gone already
        finally:
            self._socket.close()

    def exchange(
        self, data: bytes, deadline: float, *, until: type[object] | None = None, confirmed: int | None = None
    ) -> None:
        """Write all of `data` while reading; then go on reading until what was asked for is there.

        Raises:
            OutboxError: the broker refused, closed, blocked for too long, or did not answer before the deadline.

        """
        view = memoryview(data)
        blocked_since: float | None = None
        while True:
            self._receive()
            if not view and self._is_done(until, confirmed):
                return
            now = time.monotonic()
            blocked_since = (blocked_since or now) if self.blocked is not None else None
            self._check_times(now, deadline, blocked_since)
            readable, writable, _ = select.select([self._socket], [self._socket] if view else [], [], 0.2)
            if writable:
                view = view[self._send(view[:_SEND_PIECE]) :]
            elif not readable and not view:
                self._beat(now)

    def _is_done(self, until: type[object] | None, confirmed: int | None) -> bool:
        if until is not None:
            return any(isinstance(each, until) for each in self._inbox)
        if confirmed is not None:
            return self.confirms.are_answered(confirmed)
        self._beat(time.monotonic())
        return True

    def _check_times(self, now: float, deadline: float, blocked_since: float | None) -> None:
        if self.blocked is not None and blocked_since is not None and now - blocked_since > _BLOCKED_PATIENCE:
            raise self._unavailable(f"blocks publishers ({self.blocked}); free its disk or memory")
        if now > deadline:
            raise self._unavailable("did not answer in time")
        if now - self._last_received > 2 * self._heartbeat:
            raise self._unavailable("is silent, heartbeats are missing")

    def _beat(self, now: float) -> None:
        if now - self._last_sent > self._heartbeat / 3:
            self._send(memoryview(heartbeat.Heartbeat().marshal()))

    def _send(self, piece: memoryview) -> int:
        try:
            sent = self._socket.send(piece)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as err:
            self._receive()  # the broker's own words, if it said any before it closed
            raise self._unavailable(f"broke the connection ({err.strerror or err})") from err
        self._last_sent = time.monotonic()
        return sent

    def _receive(self) -> None:
        """Take all that has arrived; raise what the broker closed for."""
        while True:
            try:
                data = self._socket.recv(65536)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as err:
                raise self._unavailable(f"broke the connection ({err.strerror or err})") from err
            if not data:
                raise self._unavailable("closed the connection")
            self._last_received = time.monotonic()
            self._received += data
            self._take_frames()

    def _take_frames(self) -> None:
        start = 0
        view = bytes(self._received)
        while len(view) - start >= _FRAME.size:
            if view.startswith(b"AMQP", start):
                raise self._unavailable("does not speak AMQP 0-9-1")
            _, _, size = _FRAME.unpack_from(view, start)
            end = start + _FRAME.size + size + 1
            if len(view) < end:
                break
            if (ack := read_ack(view, start, end)) is not None:
                self.confirms.answer(ack.tag, multiple=ack.multiple, accepted=True)
                start = end
                continue
            try:
                _, _, value = frame.unmarshal(view[start:end])
            except exceptions.UnmarshalingException as err:
                raise self._unavailable("sent a frame that cannot be read") from err
            start = end
            self._dispatch(value)
        del self._received[:start]

    def _dispatch(self, value: Any) -> None:
        match value:
            case commands.Basic.Nack():
                self.confirms.answer(value.delivery_tag, multiple=value.multiple, accepted=False)
            case commands.Basic.Return():
                self._returning = value  # which message it was, its header says: the next frame
            case header.ContentHeader() if self._returning is not None:
                self._take_returned(self._returning, value)
            case commands.Connection.Blocked():
                self.blocked = value.reason
            case commands.Connection.Unblocked():
                self.blocked = None
            case commands.Connection.Close():
                raise self._closed_by_broker(value.reply_code or 0, value.reply_text)
            case commands.Channel.Close():
                raise self._channel_closed(value.reply_code or 0, value.reply_text)
            case _:
                self._inbox.append(value)
                del self._inbox[:-8]  # contents of returned messages are not kept

    def _take_returned(self, method: commands.Basic.Return, content: header.ContentHeader) -> None:
        self._returning = None
        reply = f"{method.reply_code} {method.reply_text}"
        headers = content.properties.headers or {}
        self.returned.append(Returned(reply, method.exchange, method.routing_key or "", headers))

    def _closed_by_broker(self, code: int, text: str) -> OutboxError:
        if code == 403:
            return TransientError(
                f"RabbitMQ at {self._address} refuses the login of user {self._address.username}; correct the "
                "target's Secret",
                reason=Reason.AUTHENTICATION_FAILED,
            )
        if code == 530:
            return ConfigurationError(
                f"RabbitMQ at {self._address} refuses the virtual host {self._address.vhost} ({text}); create it, or "
                "correct `vhost` in the target's Secret",
                reason=Reason.CONNECTION_SECRET_INVALID,
            )
        return self._unavailable(f"closed the connection ({code} {text})")

    def _channel_closed(self, code: int, text: str) -> OutboxError:
        if code == 404:
            return TransientError(
                f"RabbitMQ at {self._address}: {text}; declare the exchange, or correct target.rabbitmq.exchange",
                reason=Reason.MESSAGE_UNROUTABLE,
            )
        if code == 403:
            return ConfigurationError(
                f"RabbitMQ at {self._address}: {text}; grant the user write permission",
                reason=Reason.PERMISSION_DENIED,
            )
        if code in (311, 406):
            return HandlerError(f"RabbitMQ at {self._address}: {text}", reason=Reason.MESSAGE_REJECTED)
        return self._unavailable(f"closed the channel ({code} {text})")

    def _unavailable(self, what: str) -> TransientError:
        return build_unavailable(self._address, what)
