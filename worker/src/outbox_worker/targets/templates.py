"""PURE: where a message is published, by a template of the resource or by its key; and why it cannot be published."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError, HandlerError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from outbox_core.message import Message
    from outbox_core.spec import PartitionKey

PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")
"""What stands for a value of the row."""


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
