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
    def example(self) -> str:
        """How a URI looks."""
        return f"{self.plain[0]}://user:password@host:{self.plain[1]}/vhost"


AMQP: Final = Protocol("rabbitmq", ("amqp", 5672), ("amqps", 5671))
STREAM: Final = Protocol("rabbitmqStream", ("rabbitmq-stream", 5552), ("rabbitmq-stream+tls", 5551))
_LONGEST_VHOST: Final = 127


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
    authority = values["ca.crt"]
    scheme = protocol.plain if authority is None else protocol.tls
    if uri := values["uri"]:
        scheme, values = _take_apart(uri, protocol)
    host, port = values["host"], values["port"] or str(scheme[1])
    if not host:
        raise invalid_secret(
            f"{directory.resolve()} has no file `uri` and no file `host`; put {protocol.example} into `uri`, or one "
            "value each into `host`, `port`, `username`, `password` and `vhost`",
            protocol.target,
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise invalid_secret("`port` is not a port number", protocol.target)
    vhost = values["vhost"] or "/"
    if protocol is AMQP and len(vhost) > _LONGEST_VHOST:
        raise invalid_secret(
            f"`vhost` is longer than the {_LONGEST_VHOST} characters that AMQP allows", protocol.target
        )
    return BrokerAddress(
        host=host,
        port=int(port),
        username=values["username"] or "guest",
        password=values["password"] or "guest",
        vhost=vhost,
        tls=authority is not None or scheme == protocol.tls,
        certificate_authority=authority,
        target=protocol.target,
    )


def _take_apart(uri: str, protocol: Protocol) -> tuple[tuple[str, int], dict[str, str | None]]:
    """Return the scheme of a URI, with its port, and what it holds of the Secret's other keys."""
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        # What cannot be read as a port may be a piece of the password.
        raise invalid_secret(f"`uri` is not a URI such as {protocol.example}", protocol.target) from None
    scheme = next((each for each in (protocol.plain, protocol.tls) if each[0] == parts.scheme), None)
    if scheme is None or not parts.hostname:
        what = f"`uri` must look like {protocol.example}, or {protocol.tls[0]}://… for TLS"
        raise invalid_secret(what, protocol.target)
    return scheme, {
        "host": parts.hostname,
        "port": str(port) if port else None,
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "vhost": unquote(parts.path[1:]),
    }


def open_socket(address: BrokerAddress, seconds: float) -> socket.socket:
    """Connect, with TLS where the address says so; the socket does not block.

    `seconds` is the longest wait for the connection, and for each step of the handshake.

    Raises:
        TransientError: the broker cannot be reached.
        ConfigurationError: its certificate is not trusted, or `ca.crt` is none.

    """
    context = build_tls(address.certificate_authority, address.target) if address.tls else None
    try:
        raw = socket.create_connection((address.host, address.port), timeout=seconds)
    except (OSError, UnicodeError) as err:  # the latter: of what is no name of a host
        raise build_unavailable(address, f"cannot be reached ({getattr(err, 'strerror', None) or err})") from err
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
        f"RabbitMQ at {address} refuses the virtual host {address.vhost}{said}; create it, give user "
        f"{address.username} permissions there, or correct `vhost` in the target's Secret",
        reason=Reason.CONNECTION_SECRET_INVALID,
    )
