"""Two sessions, interleaved on purpose: one call runs in the background until it is seen waiting for a lock."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.servers.postgres import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.servers.postgres import Database

Result = TypeVar("Result")


@contextmanager
def background(call: Callable[[], Result]) -> Iterator[Future[Result]]:
    """Run the call in a thread; the block ends when it has."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


def wait_until_blocked(database: Database, call: Future[Any], sessions: int = 1) -> None:
    """Wait until so many sessions of this database wait for a lock; fail if the call ends instead."""
    observer = database.direct()

    def blocked() -> bool:
        assert not call.done(), f"it did not wait: {call.exception() or call.result()}"
        row = observer.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
        return row is not None and row[0] >= sessions

    wait_until(blocked, "a session waits for a lock")
    observer.close()
