"""Who may ask a worker: the operator by signed questions, Prometheus by a token. Probes are the kubelet's, and open.

Without a key, outside a cluster, only this machine may ask.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError
from outbox_core.proof import is_same, sign_answer, sign_question

if TYPE_CHECKING:
    from outbox_worker.settings import Settings

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
        pod_uid: this pod's.
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
