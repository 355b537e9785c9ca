"""PURE: values of a message as targets send them: in templates, as its key, its trace context, as text of bytes.

Encoders put a message together as text of which each character is one byte (ISO 8859-1), and it becomes bytes at the
end: one formatted string for a message takes half of the time that bytes take.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError, HandlerError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from outbox_core.message import Message
    from outbox_core.spec import PartitionKey

KEPT: Final = 10_000
"""Shapes, kinds and sizes of messages of which an encoder keeps what it encoded."""
PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")
"""What stands for a value of the row."""
TRACE_HEADERS: Final = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[!-~]([ -~]{0,510}[!-~])?"),
}
"""The headers of a W3C trace context (https://www.w3.org/TR/trace-context/), and what their values look like."""


def fill_template(template: str, message: Message, *, field: str, without_key: str | None = None) -> str:
    """Put the values of the row where {messageType}, {publicationId} and {partitionKey} stand.

    `field` of the resource is for the error; `without_key` stands for a partition key that is null, where it is given.

    Raises:
        HandlerError: a value is null.

    """
    row = {"messageType": message.message_type, "publicationId": message.publication_id}
    row["partitionKey"] = without_key if message.partition_key is None else message.partition_key

    def value(place: re.Match[str]) -> str:
        found = row[place[1]]
        if found is None:
            raise build_refusal(message, f"{field} names {place[0]}, which is null in its row")
        return found

    return PLACEHOLDER.sub(value, template)


def build_refusal(message: Message, why: str) -> HandlerError:
    """Say that a message cannot be published."""
    return HandlerError(f"the message at {message.pair} cannot be published: {why}", reason=Reason.MESSAGE_REJECTED)


def check_key(key: PartitionKey, target: str) -> None:
    """Look whether a message's key can be known outside the database.

    Raises:
        ConfigurationError: it is in a column that is not read.

    """
    if key.column not in (None, "partition_key"):
        where = "source.table.columns.partitionKey"
        raise ConfigurationError(f"target.{target} sees the key in a column only where {where} names it: do that")


def read_trace(metadata: str | None) -> dict[str, str]:
    """Return the headers of the trace context that a producer stored; empty: none that a receiver could read."""
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


def characters(data: bytes) -> str:
    """Return bytes as such text."""
    return data.decode("latin-1")


def utf8(text: str) -> str:
    """Return any text in UTF-8, as such text."""
    return text if text.isascii() else characters(text.encode())
