"""PURE: how operator and worker prove to each other that they have the key of one resource. The key never travels.

A question is signed over the pod that it is for, a nonce, and what is asked; its answer over that signature and what is
said. So a question fits no other pod, and an answer no other question. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

NONCE_HEADER: Final = "Outbox-Nonce"
"""Of a question: never used twice."""
SIGNATURE_HEADER: Final = "Outbox-Signature"
"""Of a question and of its answer."""


def sign_question(key: bytes, pod_uid: str, nonce: str, method: str, path: str, body: bytes) -> str:
    """Sign what a pod is asked."""
    return _sign(key, b"question", *(part.encode() for part in (pod_uid, nonce, method, path)), body)


def sign_answer(key: bytes, question: str, body: bytes) -> str:
    """Sign what is answered to a question, which is named by its signature."""
    return _sign(key, b"answer", question.encode(), body)


def is_same(one: str, other: str) -> bool:
    """Compare signatures in a time that tells nothing of them; a header may hold anything."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


def _sign(key: bytes, *parts: bytes) -> str:
    """Sign the parts, each with its length, so that no two lists of parts are the same bytes."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.hexdigest()
