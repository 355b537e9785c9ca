"""PURE: the W3C trace context (https://www.w3.org/TR/trace-context/) that a producer stored in a message's metadata."""

from __future__ import annotations

import json
import re
from typing import Final

TRACE_HEADERS: Final = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[!-~]([ -~]{0,510}[!-~])?"),
}
"""The headers that carry it, and what their values look like."""


def read_trace(metadata: str | None) -> dict[str, str]:
    """Return the headers to send; empty where nothing is stored, or nothing that a receiver could read."""
    if metadata is None or "traceparent" not in metadata:
        return {}
    try:
        stored = json.loads(metadata)
    except (ValueError, RecursionError):  # a mapped table may hold any text
        return {}
    found = {name: stored.get(name) for name in TRACE_HEADERS} if isinstance(stored, dict) else {}
    valid = {
        name: text for name, text in found.items() if isinstance(text, str) and TRACE_HEADERS[name].fullmatch(text)
    }
    return valid if "traceparent" in valid else {}
