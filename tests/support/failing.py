"""Messages that fail on demand, whatever the target, and what became of them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, build_config

if TYPE_CHECKING:
    from tests.support.worker import Outbox

DEADLY_HANDLER = (
    """
import pathlib
def killers():
    path = pathlib.Path("deadly")
    return set(path.read_text().split()) if path.exists() else set()
"""
    + PYTHON_HANDLER
    + """
    if any(m.message_id in killers() for m in batch):
        os._exit(137)
"""
)
"""Inserts into `handled`, and ends the process without a word at a message named in the file `deadly`."""

KEYS = 5


class Failing:
    """An outbox whose effects fail for messages named in the table `bad`: by the database, so for any target."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.connection = outbox.connection
        self.connection.execute("CREATE TABLE bad (message_id text PRIMARY KEY)")
        self.connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF EXISTS (SELECT 1 FROM bad b WHERE b.message_id = NEW.message_id) THEN "
            "RAISE EXCEPTION 'refused %', NEW.message_id USING ERRCODE = 'P0042'; END IF; RETURN NEW; END $$"
        )
        self.connection.execute("CREATE TRIGGER refuse BEFORE INSERT ON handled FOR EACH ROW EXECUTE FUNCTION refuse()")

    def produce(self, count: int, *, start: int = 0, deliver_after: str | None = None) -> None:
        """Messages n of key n % KEYS, in one transaction; `deliver_after` is an interval from now."""
        self.connection.execute(
            "INSERT INTO outbox.messages (partition_key, message_id, message_type, data, deliver_after) "
            "SELECT 'key-' || n %% %s, 'message-' || n, 'Numbered', jsonb_build_object('total', n), "
            "clock_timestamp() + %s::interval FROM generate_series(%s::int, %s::int) AS n",
            (KEYS, deliver_after, start, start + count - 1),
        )

    def break_at(self, *numbers: int) -> None:
        for number in numbers:
            self.connection.execute("INSERT INTO bad VALUES (%s)", (f"message-{number}",))

    def mend(self) -> None:
        self.connection.execute("DELETE FROM bad")

    def config(
        self,
        target: dict[str, Any],
        *,
        partitioned: bool = True,
        cursor: str | None = "TransactionOrder",
        **delivery: Any,
    ) -> dict[str, Any]:
        mode = {"mode": "Partitioned", "partitions": {"count": 2}} if partitioned else {}
        delivery = {"batchSize": 20} | mode | delivery
        return build_config(self.outbox.database, target, delivery=delivery, source={"cursor": cursor})

    def handled(self) -> list[int]:
        return [row[0] for row in self.connection.execute("SELECT total FROM handled ORDER BY n").fetchall()]

    def wait_handled(self, expected: set[int], seconds: float = 60.0) -> None:
        """Wait until these are handled, and nothing else is."""
        wait_until(lambda: set(self.handled()) >= expected, f"handled {sorted(expected)[-3:]} and before", seconds)
        assert set(self.handled()) == expected

    def assert_once_and_in_order(self) -> None:
        """Effects are numbered as they were written: once each, and rising per key."""
        handled = self.handled()
        assert len(handled) == len(set(handled)), "an effect is doubled"
        by_key = defaultdict(list)
        for number in handled:
            by_key[number % KEYS].append(number)
        assert all(each == sorted(each) for each in by_key.values()), by_key

    def held(self) -> list[tuple[str, int]]:
        """Message id and attempts of what is held, in the order of the keys."""
        return self.connection.execute(
            "SELECT message_id, attempts FROM outbox.held_messages ORDER BY key, place"
        ).fetchall()

    def dead(self) -> list[tuple[Any, ...]]:
        return self.connection.execute(
            "SELECT message_id, attempts, error_class, blocks FROM outbox.dead_letters ORDER BY id"
        ).fetchall()

    def wait_dead(self, count: int, seconds: float = 60.0) -> None:
        wait_until(lambda: len(self.dead()) == count, f"{count} dead letters", seconds)
