"""Where the broker is and how to log in: read from a mounted Secret at every connect, so that a rotation works."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from typing_extensions import override

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.secret_files import build_tls, invalid_secret, read_files

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of the broker's protocols: the target that speaks it, and its schemes and ports, plain and with TLS."""

    target: str
    plain: tuple[str, int]
    tls: tuple[str, int]

    @property
    def ports(self) -> dict[str, int]:
        """The port of each scheme, where none is named."""
        return dict((self.plain, self.tls))

    @property
    def example(self) -> str:
        """How a URI looks."""
        return f"{self.plain[0]}://user:password@host:{self.plain[1]}/vhost"


AMQP: Final = Protocol("rabbitmq", ("amqp", 5672), ("amqps", 5671))
STREAM: Final = Protocol("rabbitmqStream", ("rabbitmq-stream", 5552), ("rabbitmq-stream+tls", 5551))


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker, a virtual host and who connects."""

    host: str
    port: int
    username: str
    password: str = field(repr=False)
    vhost: str
    tls: bool
    certificate_authority: str | None = field(repr=False, default=None)
    target: str = AMQP.target

    @override
    def __str__(self) -> str:
        """Where, without who: safe to print."""
        return f"{self.host}:{self.port}"


def read_broker_address(directory: Path, protocol: Protocol = AMQP) -> BrokerAddress:
    """Read the keys of the target's Secret: `uri`, or `host`, `port`, `username`, `password`, `vhost`; and `ca.crt`.

    Raises:
        ConfigurationError: the Secret is missing or has not what is needed.

    """
    keys = ("uri", "host", "port", "username", "password", "vhost", "ca.crt")
    values = read_files(directory, *keys, target=protocol.target)
    if uri := values["uri"]:
        return _from_uri(uri, values["ca.crt"], protocol)
    host = values["host"]
    if not host:
        raise _invalid(
            f"{directory} has no file `uri` and no file `host`; put {protocol.example} into `uri`, or one value each "
            "into `host`, `port`, `username`, `password` and `vhost`",
            protocol,
        )
    tls = values["ca.crt"] is not None
    return BrokerAddress(
        host=host,
        port=_port(values["port"], protocol.tls[1] if tls else protocol.plain[1], protocol),
        username=values["username"] or "guest",
        password=values["password"] or "guest",
        vhost=values["vhost"] or "/",
        tls=tls,
        certificate_authority=values["ca.crt"],
        target=protocol.target,
    )


def _from_uri(uri: str, authority: str | None, protocol: Protocol) -> BrokerAddress:
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        # What cannot be read as a port may be a piece of the password.
        raise _invalid(f"`uri` is not a URI such as {protocol.example}", protocol) from None
    if parts.scheme not in protocol.ports or not parts.hostname:
        raise _invalid(f"`uri` must look like {protocol.example}, or {protocol.tls[0]}://… for TLS", protocol)
    return BrokerAddress(
        host=parts.hostname,
        port=port or protocol.ports[parts.scheme],
        username=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        vhost=unquote(parts.path[1:]) or "/",
        tls=parts.scheme == protocol.tls[0] or authority is not None,
        certificate_authority=authority,
        target=protocol.target,
    )


def _port(text: str | None, usual: int, protocol: Protocol) -> int:
    if text is None:
        return usual
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise _invalid("`port` is not a port number", protocol)
    return int(text)


def _invalid(what: str, protocol: Protocol) -> ConfigurationError:
    return invalid_secret(what, protocol.target)


def open_socket(address: BrokerAddress, seconds: float) -> socket.socket:
    """Connect, with TLS where the address says so; the socket does not block.

    Args:
        address: where the broker is.
        seconds: the longest wait for the connection, and for each step of the handshake.

    Raises:
        TransientError: the broker cannot be reached.
        ConfigurationError: its certificate is not trusted, or `ca.crt` is none.

    """
    context = build_tls(address.certificate_authority, address.target) if address.tls else None
    try:
        raw = socket.create_connection((address.host, address.port), timeout=seconds)
    except OSError as err:
        raise build_unavailable(address, f"cannot be reached ({err.strerror or err})") from err
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened = context.wrap_socket(raw, server_hostname=address.host) if context else raw
    except ssl.SSLCertVerificationError as err:
        raw.close()
        raise ConfigurationError(
            f"RabbitMQ at {address}: its certificate is not trusted ({err.verify_message}); "
            "put the right CA into `ca.crt` of the target's Secret",
            reason=Reason.CONNECTION_SECRET_INVALID,
        ) from err
    except OSError as err:
        raw.close()
        raise build_unavailable(address, f"does not complete a TLS handshake ({err})") from err
    opened.setblocking(False)
    return opened


def build_unavailable(address: BrokerAddress, what: str) -> TransientError:
    """Say what keeps the broker from being used now."""
    return TransientError(
        f"RabbitMQ at {address} {what}; it is tried again until it answers", reason=Reason.TARGET_UNAVAILABLE
    )


def build_login_refused(address: BrokerAddress) -> TransientError:
    """Say that the broker does not know the user, or has another password for it."""
    return TransientError(
        f"RabbitMQ at {address} refuses the login of user {address.username}; correct the target's Secret",
        reason=Reason.AUTHENTICATION_FAILED,
    )


def build_vhost_refused(address: BrokerAddress, said: str = "") -> ConfigurationError:
    """Say that the user may not use the virtual host, or that there is none of this name."""
    return ConfigurationError(
        f"RabbitMQ at {address} refuses the virtual host {address.vhost}{said}; create it, or correct `vhost` in the "
        "target's Secret",
        reason=Reason.CONNECTION_SECRET_INVALID,
    )
