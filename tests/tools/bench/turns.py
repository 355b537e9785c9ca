"""Candidates take turns: all but one are paused, so that each has the machine for itself while its database waits."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.processes import memory_mb
from tests.tools.bench.processes import cpu_of_tree, send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psycopg

    from tests.tools.bench.case import Candidate, Case
    from tests.tools.bench.servers import Place

_AT_WORK = (
    "SELECT application_name, state, coalesce(wait_event, ''), left(query, 100) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' "
    "AND (state LIKE 'idle in transaction%' OR state = 'active') AND application_name NOT LIKE '% waiting'"
)
"""Sessions that do something; but for those in which our workers wait for the log, which holds no one up."""
_ANSWERED = 0.05
"""Seconds in which the server answers what was sent before a process was stopped."""
CALM = 0.05
"""Part of a processor that servers with nothing to do may use."""
SETTLED = 3.0
"""Seconds within which they come to rest, mostly."""
_LOOK = 0.25


class Turns:
    """All candidates of a case, started."""

    def __init__(self, place: Place, candidates: Sequence[Candidate], servers: Sequence[str]) -> None:
        self._servers = {name: pid for name, pid in place.server_pids().items() if name in servers}
        self._connection = place.database.direct()
        self.candidates = candidates

    def pause(self, candidates: Sequence[Candidate]) -> None:
        """Stop them."""
        pause(self._connection, candidates)

    def resume(self, candidates: Sequence[Candidate]) -> None:
        """Let them go on."""
        send([pid for each in candidates for pid in each.pids().values()], signal.SIGCONT)

    def settle(self) -> None:
        """Wait until the servers rest: what the last one left them to write would be charged to the next one."""
        until = time.monotonic() + 2 * SETTLED
        while time.monotonic() < until:
            before, began = self._cpu_of_servers(), time.monotonic()
            time.sleep(_LOOK)
            if self._cpu_of_servers() - before < CALM * (time.monotonic() - began):
                return

    def _cpu_of_servers(self) -> float:
        return sum(cpu_of_tree(pid) for pid in self._servers.values())

    def cpu(self, candidate: Candidate) -> dict[str, float]:
        """Return the CPU seconds so far of a candidate's processes and of the servers."""
        pids = dict(candidate.pids()) | self._servers
        return {name: cpu_of_tree(pid) for name, pid in pids.items()}

    def peak_mb(self, candidate: Candidate) -> float:
        """Return the most memory that one of its processes had."""
        return max((memory_mb(pid, "peak") for pid in candidate.pids().values()), default=0.0)


def pause(connection: psycopg.Connection[Any], candidates: Sequence[Candidate]) -> None:
    """Stop them where no session holds anything open: the one at work would wait for it.

    A worker that reads ahead is seldom there: its second session ends with what it sends, which only a worker that runs
    takes. So it is tried often.
    """
    pids = [pid for each in candidates for pid in each.pids().values()]
    until = time.monotonic() + 60
    while True:
        send(pids, signal.SIGSTOP)
        if not (at_work := _find_sessions(connection)):
            return
        send(pids, signal.SIGCONT)
        assert time.monotonic() < until, f"the paused candidates still work: {at_work}"
        time.sleep(random.uniform(0, 0.02))  # another moment of a batch


def _find_sessions(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """Return the sessions that do not end what they do while their processes are stopped."""
    until = time.monotonic() + _ANSWERED
    while True:
        is_answered = time.monotonic() > until
        found = connection.execute(_AT_WORK).fetchall()
        if is_answered or any(state != "active" or wait == "ClientWrite" for _, state, wait, _ in found):
            return found
        time.sleep(_ANSWERED / 10)


@contextmanager
def started(place: Place, case: Case) -> Iterator[Turns]:
    """Start all that a case compares, and end all."""
    candidates = case.candidates()
    with ExitStack() as closing:
        for each in candidates:
            closing.callback(each.stop)
            each.start(place)
        turns = Turns(place, candidates, case.servers)
        closing.callback(turns.resume, candidates)
        yield turns
