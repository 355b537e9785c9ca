"""PURE: the key of each resource, which follows from the installation's, so that none has to be read back.

Operator and workers sign with it what they ask and answer (`outbox_core.proof`).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from outbox_operator.api.naming import child_name


@dataclass(frozen=True, slots=True)
class Keys:
    """What one installation knows: its key, and the SHA-256 in hexadecimal of the token that reads workers' metrics."""

    master: bytes = field(default=b"", repr=False)
    metrics_hash: str = ""

    def of(self, uid: str) -> bytes:
        """Derive the key of a resource, as its pods read it."""
        return hmac.new(self.master, b"resource " + uid.encode(), hashlib.sha256).hexdigest().encode()

    def secret_name(self, name: str, uid: str) -> str:
        """Name the Secret with a resource's key: another client cannot make it first; another key has another name."""
        return child_name(name, f"key-{hashlib.sha256(self.of(uid)).hexdigest()[:8]}")
