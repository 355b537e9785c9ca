"""Producers: messages stored as an application would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.servers.postgres import Database

if TYPE_CHECKING:
    import psycopg


def insert(
    where: Database | psycopg.Connection[Any], *types: str, publication: str = "default", data: str = "{}"
) -> None:
    """Store one message of each type, in order: in the connection's open transaction, or in one of their own."""
    if isinstance(where, Database):
        connection = where.direct(autocommit=False)
        insert(connection, *types, publication=publication, data=data)
        connection.commit()
        connection.close()
        return
    for message_type in types:
        where.execute(
            "INSERT INTO outbox.messages (message_type, publication_id, data) VALUES (%s, %s, %s::jsonb)",
            (message_type, publication, data),
        )
