"""Carries out what the schedule says, one thread for each fault, and notes when each really began and ended."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import psycopg

from tests.chaos.cases import LEASE_SECONDS, Target
from tests.chaos.schedule import AT_ONCE, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.chaos.pods import Pod, Pods
    from tests.chaos.proxies import Proxies
    from tests.chaos.schedule import Fault
    from tests.chaos.servers import Postgres
    from tests.support.rabbitmq import RabbitmqServer

OWNERS_SHARE: Final = 0.75
"""Of the blows at one process, how many are at an owner."""
BROKER_STARTS: Final = 4
_OWNED: Final = """
SELECT pod, partition FROM outbox.processor_leases
 WHERE processor_id = %s AND token IS NOT NULL AND expires_at > clock_timestamp()
"""
_IN_BATCH: Final = """
SELECT split_part(application_name, ' ', 3) FROM pg_stat_activity
 WHERE application_name LIKE 'outbox ' || %s || ' %%' AND wait_event = 'PgSleep'
"""
_GATE: Final = """
INSERT INTO chaos.gates (name, until) VALUES (%s, clock_timestamp() + make_interval(secs => %s))
    ON CONFLICT (name) DO UPDATE SET until = excluded.until
"""
_TERMINATE: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox ' || %s || ' %%'
"""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it really was; times in seconds since 1970.

    Attributes:
        counts_from: from when on a recovery counts.
        partitions: what stood still by it: all of them (empty), or those that the victim owned.
        note: what there is to say: the victim, or why nothing was done.
        harmless: nothing stood still, for example because the victim owned nothing: no recovery.

    """

    fault: Fault
    began: float
    ended: float
    counts_from: float
    partitions: tuple[int, ...] = ()
    note: str = ""
    harmless: bool = False


@dataclass
class Blow:
    """What an action says of itself."""

    note: str = ""
    partitions: tuple[int, ...] = ()
    harmless: bool = False


class Faults:
    """Everything a fault can reach."""

    def __init__(
        self,
        postgres: Postgres,
        broker: RabbitmqServer | None,
        proxies: Proxies,
        pods: Mapping[str, Pods],
        journal: Path,
    ) -> None:
        """Keep what to strike at."""
        self._postgres, self._broker, self._proxies, self._pods = postgres, broker, proxies, pods
        self._journal = journal
        self.struck: list[Struck] = []
        self._acts: dict[Kind, Callable[[Fault], Blow]] = {
            Kind.KILL: self._kill,
            Kind.FREEZE: self._freeze,
            Kind.FREEZE_IN_BATCH: self._freeze_in_batch,
            Kind.SLOW: self._slow,
            Kind.TERMINATE: self._terminate,
            Kind.CUT: self._cut,
            Kind.SILENCE: self._silence,
            Kind.DELAY: self._delay,
            Kind.TEAR: self._tear,
            Kind.CLOCK: self._clock,
            Kind.SCALE: self._scale,
            Kind.POSTGRES: self._crash_postgres,
            Kind.DISK: self._fill_disk,
            Kind.BROKER: self._crash_broker,
        }

    def strike(self, fault: Fault) -> Struck:
        """Carry one out, to its end."""
        began = time.time()
        blow = self._acts[fault.kind](fault)
        ended = time.time()
        counts_from = began if fault.kind in AT_ONCE else ended
        struck = Struck(fault, began, ended, counts_from, blow.partitions, blow.note, blow.harmless)
        self.struck.append(struck)
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(struck)) + "\n")
        return struck

    def _kill(self, fault: Fault) -> Blow:
        pod, owned = self._victim(fault)
        if pod is None:
            return _nobody()
        self._pods[fault.case].kill(pod, restart_after=fault.amount)
        return Blow(pod.name, owned, harmless=not owned)

    def _freeze(self, fault: Fault) -> Blow:
        pod, owned = self._victim(fault)
        if pod is None:
            return _nobody()
        return self._hold_frozen(fault, pod, owned)

    def _freeze_in_batch(self, fault: Fault) -> Blow:
        """Stop a process while its batch is handled: in its statement, or waiting for the broker's confirms."""
        pods = self._pods[fault.case]
        if pods.case.target is Target.RABBITMQ:
            pod, owned = self._victim(fault, owner=True)
            if pod is None:
                return _nobody()
            with self._proxies.toxic(f"{fault.case}-broker", "latency", {"latency": 1000}):
                time.sleep(0.5)
                return self._hold_frozen(fault, pod, owned)
        name = self._wait_in_batch(fault)
        pod = next((pod for pod in pods.alive() if pod.name == name), None)
        if pod is None:
            return Blow("nobody was in a batch", harmless=True)
        return self._hold_frozen(fault, pod, self._owned(fault.case).get(pod.name, ()))

    def _wait_in_batch(self, fault: Fault) -> str | None:
        with contextlib.suppress(psycopg.Error), self._postgres.connect(self._pods[fault.case].case.database) as look:
            look.execute(_GATE, [fault.case, LEASE_SECONDS])
            deadline = time.monotonic() + LEASE_SECONDS
            while time.monotonic() < deadline:
                row = look.execute(_IN_BATCH, [fault.case]).fetchone()
                if row is not None:
                    return str(row[0])
                time.sleep(0.01)
        return None

    def _hold_frozen(self, fault: Fault, pod: Pod, owned: tuple[int, ...]) -> Blow:
        pods = self._pods[fault.case]
        pods.freeze(pod)
        time.sleep(fault.seconds)
        pods.thaw(pod)
        return Blow(pod.name, owned, harmless=not owned)

    def _slow(self, fault: Fault) -> Blow:
        """Make handling slower than the lease is long: heartbeats keep it."""
        if self._pods[fault.case].case.target is Target.RABBITMQ:
            milliseconds = {"latency": int(fault.seconds * 500)}
            with self._proxies.toxic(f"{fault.case}-broker", "latency", milliseconds):
                time.sleep(fault.seconds)
            return Blow("its broker answers late")
        try:
            with self._postgres.connect(self._pods[fault.case].case.database) as connection:
                connection.execute(_GATE, [fault.case, fault.seconds])
        except psycopg.Error:
            return Blow("the database was not there", harmless=True)
        time.sleep(fault.seconds)
        return Blow("every batch waits in its middle")

    def _terminate(self, fault: Fault) -> Blow:
        try:
            with self._postgres.connect(self._pods[fault.case].case.database) as connection:
                count = len(connection.execute(_TERMINATE, [fault.case]).fetchall())
        except psycopg.Error:
            return Blow("the database was not there", harmless=True)
        return Blow(f"{count} backends")

    def _cut(self, fault: Fault) -> Blow:
        with self._proxies.cut(_proxy(fault)):
            time.sleep(fault.seconds)
        return Blow(_proxy(fault))

    def _silence(self, fault: Fault) -> Blow:
        with self._proxies.toxic(_proxy(fault), "timeout", {"timeout": 0}):
            time.sleep(fault.seconds)
        return Blow(_proxy(fault))

    def _delay(self, fault: Fault) -> Blow:
        attributes = {"latency": int(fault.amount), "jitter": int(fault.amount / 4)}
        with self._proxies.toxic(_proxy(fault), "latency", attributes):
            time.sleep(fault.seconds)
        return Blow(f"{_proxy(fault)}: {fault.amount:.0f} ms each way")

    def _tear(self, fault: Fault) -> Blow:
        with self._proxies.toxic(_proxy(fault), "limit_data", {"bytes": int(fault.amount)}):
            time.sleep(fault.seconds)
        return Blow(f"{_proxy(fault)}: connections end after {fault.amount:.0f} bytes")

    def _clock(self, fault: Fault) -> Blow:
        pod, owned = self._victim(fault)
        if pod is None:
            return _nobody()
        pod.step_clock(fault.amount)
        return Blow(f"{pod.name} by {fault.amount:+.0f} s", owned, harmless=not owned)

    def _scale(self, fault: Fault) -> Blow:
        pods = self._pods[fault.case]
        before, pods.wanted = pods.wanted, int(fault.amount)
        return Blow(f"from {before} to {pods.wanted} replicas")

    def _crash_postgres(self, fault: Fault) -> Blow:
        self._postgres.crash()
        time.sleep(fault.seconds)
        self._postgres.start()
        return Blow("pg_ctl stop -m immediate")

    def _fill_disk(self, fault: Fault) -> Blow:
        self._postgres.fill(leave=int(fault.amount))
        time.sleep(fault.seconds)
        was_up = self._postgres.is_running()
        self._postgres.free()
        return Blow("the server stayed up" if was_up else "the server ended and was started")

    def _crash_broker(self, fault: Fault) -> Blow:
        if self._broker is None:
            return Blow("there is none", harmless=True)
        self._broker.stop()
        time.sleep(fault.seconds)
        for attempt in range(1, BROKER_STARTS + 1):
            try:
                self._broker.start()
            except AssertionError:  # as a supervisor would: it gave up by itself, or took too long on a busy machine
                self._broker.stop()
                if attempt == BROKER_STARTS:
                    raise
            else:
                break
        return Blow(f"SIGKILL of its node, back at start {attempt}")

    def _victim(self, fault: Fault, *, owner: bool = False) -> tuple[Pod | None, tuple[int, ...]]:
        """Pick a living process by the schedule's share, and say what it owns."""
        owned = self._owned(fault.case)
        alive = self._pods[fault.case].alive()
        owners = [pod for pod in alive if pod.name in owned]
        among = owners if owners and (owner or fault.choice < OWNERS_SHARE) else alive
        if not among:
            return None, ()
        pod = among[int(fault.choice * 997) % len(among)]
        return pod, owned.get(pod.name, ())

    def _owned(self, case: str) -> dict[str, tuple[int, ...]]:
        owned: dict[str, tuple[int, ...]] = {}
        with contextlib.suppress(psycopg.Error), self._postgres.connect(self._pods[case].case.database) as connection:
            for pod, partition in connection.execute(_OWNED, [case]):
                owned[pod] = (*owned.get(pod, ()), partition)
        return owned


def _nobody() -> Blow:
    return Blow("nobody was alive", harmless=True)


def _proxy(fault: Fault) -> str:
    return f"{fault.case}-{'broker' if fault.broker else 'database'}"
