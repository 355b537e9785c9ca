"""The handler of orders-loyalty: one point for each whole euro. The worker imports a copy of this file."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

LINES = "COPY shop.loyalty_lines (message_id, partition_key) FROM STDIN"
ADD = """
INSERT INTO shop.loyalty_points AS mine (customer, points) VALUES (%s, %s)
ON CONFLICT (customer) DO UPDATE SET points = mine.points + excluded.points
"""


def handle(batch: Any, connection: psycopg.Connection[Any]) -> None:
    """Everything here commits together with the checkpoint."""
    points: Counter[str] = Counter()
    with connection.cursor() as cursor:
        with cursor.copy(LINES) as lines:
            for message in batch.messages:
                order = json.loads(message.data)
                if isinstance(order, dict) and isinstance(order.get("cents"), int):
                    points[str(order.get("customer", "unknown"))] += order["cents"] // 100
                lines.write_row((message.message_id, message.partition_key))
        # In one order: another partition's transaction may add to the same customers.
        cursor.executemany(ADD, sorted(points.items()))
