"""Carries out what the schedule says, one thread for each fault, and notes when each really began and ended."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import psycopg

from tests.support.servers.postgres import wait_until
from tests.tools.chaos.cases import COUNTS, LEASE_SECONDS
from tests.tools.chaos.schedule import AT_ONCE, Kind
from tests.tools.chaos.victims import Victim, Victims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from tests.tools.chaos.brokers import Brokers
    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.processes.pods import Pod, Pods
    from tests.tools.chaos.processes.proxies import Proxies
    from tests.tools.chaos.schedule import Fault
    from tests.tools.chaos.servers import Databases, Postgres

BROKER_STARTS: Final = 4
CLOCK_SLACK: Final = 3.0
"""Seconds that a worker may take to say what time it is."""
_IN_BATCH: Final = """
SELECT chaos.worker_of(application_name) FROM pg_stat_activity
 WHERE application_name ~ ('^outbox ' || %s || '[ .]worker-') AND wait_event = 'PgSleep'
"""
_GATE: Final = """
INSERT INTO chaos.gates (name, until) VALUES (%s, clock_timestamp() + make_interval(secs => %s))
    ON CONFLICT (name) DO UPDATE SET until = excluded.until
"""
_TERMINATE: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ ('^outbox ' || %s || '[ .]worker-')
"""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it really was; times in seconds since 1970.

    Attributes:
        counts_from: from when on a recovery counts.
        partitions: what stood still by it: all of them (empty), or those that the victim owned.
        messages: what the victim had in hand, in mode Competing: these stood still, and nothing else.
        note: what there is to say: the victim, or why nothing was done.
        expired: a frozen process had lost its lease, or what it had in hand, by the time it woke.
        harmless: nothing stood still, for example because the victim owned nothing: no recovery.

    """

    fault: Fault
    began: float
    ended: float
    counts_from: float
    partitions: tuple[int, ...] = ()
    note: str = ""
    harmless: bool = False
    messages: tuple[str, ...] = ()
    expired: bool = False


@dataclass
class Blow:
    """What an action says of itself; `alone_until`: before that no other process was up that could go on."""

    note: str = ""
    partitions: tuple[int, ...] = ()
    harmless: bool = False
    messages: tuple[str, ...] = ()
    expired: bool = False
    alone_until: float | None = None


class Faults:
    """Everything a fault can reach."""

    def __init__(
        self,
        databases: Databases,
        brokers: Brokers,
        proxies: Proxies,
        pods: Mapping[str, Pods],
        journal: Path,
    ) -> None:
        """Keep what to strike at."""
        self._databases, self._proxies, self._pods = databases, proxies, pods
        self._rabbitmq, self._kafka = brokers.rabbitmq, brokers.kafka
        self._victims = Victims(databases, pods)
        self._journal = journal
        self.struck: list[Struck] = []
        self._acts: dict[Kind, Callable[[Fault], Blow]] = {
            Kind.KILL: self._kill,
            Kind.KILL_IN_BATCH: self._kill_in_batch,
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
            Kind.DIVIDE: self._divide,
            Kind.DIVIDE_FROZEN: self._divide_over_frozen,
            Kind.POSTGRES: lambda fault: _crash(self._databases.source, fault),
            Kind.BACKEND: self._kill_backend,
            Kind.REPORTING: self._crash_reporting,
            Kind.DISK: self._fill_disk,
            Kind.BROKER: self._crash_broker,
            Kind.KAFKA: self._freeze_kafka,
            Kind.KAFKA_CRASH: self._crash_kafka,
        }

    def strike(self, fault: Fault) -> Struck:
        """Carry one out, to its end."""
        began = time.time()
        blow = self._acts[fault.kind](fault)
        ended = time.time()
        counts_from = blow.alone_until or (began if fault.kind in AT_ONCE else ended)
        struck = Struck(
            fault, began, ended, counts_from, blow.partitions, blow.note, blow.harmless, blow.messages, blow.expired
        )
        self.struck.append(struck)
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(struck)) + "\n")
        return struck

    def _kill(self, fault: Fault) -> Blow:
        pod = self._victims.choose(fault)
        return _nobody() if pod is None else self._kill_one(fault, pod)

    def _freeze(self, fault: Fault) -> Blow:
        pod = self._victims.choose(fault)
        return _nobody() if pod is None else self._freeze_one(fault, pod)

    def _kill_in_batch(self, fault: Fault) -> Blow:
        """Kill a process while its batch is handled: in its statement, or waiting for the broker's confirms."""
        with self._caught_in_batch(fault) as pod:
            return Blow("nobody was in a batch", harmless=True) if pod is None else self._kill_one(fault, pod)

    def _freeze_in_batch(self, fault: Fault) -> Blow:
        """Freeze one there, for longer than its lease."""
        with self._caught_in_batch(fault) as pod:
            if pod is None:
                return Blow("nobody was in a batch", harmless=True)
            blow = self._freeze_one(fault, pod)
        return blow

    @contextlib.contextmanager
    def _caught_in_batch(self, fault: Fault) -> Iterator[Pod | None]:
        pods = self._pods[fault.case]
        if not pods.case.target.is_database:
            # Only the answers are late: the broker has the batch, and its checkpoint is not stored.
            with self._proxies.toxic(f"{fault.case}-target", "latency", {"latency": 1000}, streams=("downstream",)):
                time.sleep(0.5)
                pod = self._victims.choose(fault, owner=True)
                if pod is not None:
                    pods.freeze(pod)
            # It stands still: the process that goes on is not to be slowed.
            yield pod
        else:
            name = self._wait_in_batch(fault)
            yield next((pod for pod in pods.alive() if pod.name == name), None)

    def _wait_in_batch(self, fault: Fault) -> str | None:
        with contextlib.suppress(psycopg.Error), self._connect(fault) as look:
            look.execute(_GATE, [fault.case, LEASE_SECONDS])
            deadline = time.monotonic() + LEASE_SECONDS
            while time.monotonic() < deadline:
                row = look.execute(_IN_BATCH, [fault.case]).fetchone()
                if row is not None:
                    look.execute(_GATE, [fault.case, 0])
                    return str(row[0])
                time.sleep(0.01)
        return None

    def _kill_one(self, fault: Fault, pod: Pod) -> Blow:
        pods = self._pods[fault.case]
        pods.freeze(pod)  # so that it finishes nothing while we look at what it has
        victim = self._victims.look_at(pods.case, pod)
        pods.kill(pod, restart_after=fault.amount)
        blow = _blow(pods.case, victim)
        if not pods.alive():
            wait_until(pods.has_one_that_answers, f"a process of {fault.case} after its only one was killed")
            blow.alone_until = time.time()
        return blow

    def _freeze_one(self, fault: Fault, pod: Pod) -> Blow:
        """Hold it frozen, and see whether its lease is over at the end."""
        pods = self._pods[fault.case]
        pods.freeze(pod)
        began, alone = time.monotonic(), not pods.alive()
        victim = self._victims.look_at(pods.case, pod)
        time.sleep(max(0.0, began + fault.seconds - time.monotonic()))
        blow = _blow(pods.case, victim)
        with contextlib.suppress(psycopg.Error):
            blow.expired = not blow.harmless and pod.name not in self._victims.ask_owned(pods.case)
            blow.note += ", whose lease was over when it woke" if blow.expired else ""
        pods.thaw(pod)
        if alone:
            blow.alone_until = time.time()
        return blow

    def _slow(self, fault: Fault) -> Blow:
        """Make handling slower than the lease is long: heartbeats keep it."""
        if not self._pods[fault.case].case.target.is_database:
            milliseconds = {"latency": int(fault.seconds * 500)}
            with self._proxies.toxic(f"{fault.case}-target", "latency", milliseconds):
                time.sleep(fault.seconds)
            return Blow("its broker answers late")
        try:
            with self._connect(fault) as connection:
                connection.execute(_GATE, [fault.case, fault.seconds])
        except psycopg.Error:
            return Blow("the database was not there", harmless=True)
        time.sleep(fault.seconds)
        return Blow("every batch waits in its middle")

    def _terminate(self, fault: Fault) -> Blow:
        count = 0
        try:
            for server in self._databases.all():
                with server.connect() as connection:
                    count += len(connection.execute(_TERMINATE, [fault.case]).fetchall())
        except psycopg.Error:
            return Blow("a database was not there", harmless=not count)
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
        pod = self._victims.choose(fault)
        if pod is None:
            return _nobody()
        victim = self._victims.look_at(self._pods[fault.case].case, pod)
        pod.step_clock(fault.amount)
        began = time.time()
        said = pod.read_clock()
        if said is not None and not -CLOCK_SLACK < said - fault.amount - began < time.time() - began + CLOCK_SLACK:
            raise RuntimeError(f"{pod.name} was stepped by {fault.amount:+.0f} s and says {said - began:+.0f} s")
        note = f"{pod.name} by {fault.amount:+.0f} s" + (", as it says itself" if said is not None else "")
        return Blow(note, victim.partitions, harmless=not victim.partitions)

    def _scale(self, fault: Fault) -> Blow:
        pods = self._pods[fault.case]
        before, pods.wanted = pods.wanted, int(fault.amount)
        return Blow(f"from {before} to {pods.wanted} replicas")

    def _divide(self, fault: Fault) -> Blow:
        """Ask for another number of partitions; the change itself goes on while the next faults strike."""
        pods = self._pods[fault.case]
        before = pods.partitions
        others = [count for count in COUNTS if count != before]
        pods.change_partitions(others[int(fault.amount * len(others)) % len(others)])
        return Blow(f"from {before} to {pods.partitions}")

    def _divide_over_frozen(self, fault: Fault) -> Blow:
        """Let one process sleep from before the change: what it believes when it wakes is of the former number."""
        pod = self._victims.choose(fault)
        if pod is None:
            return _nobody()
        pods = self._pods[fault.case]
        pods.freeze(pod)
        blow = self._divide(fault)
        time.sleep(fault.seconds)
        pods.thaw(pod)
        blow.note += f", {pod.name} frozen over it"
        return blow

    def _kill_backend(self, fault: Fault) -> Blow:
        """Kill one of the server's own processes, as the kernel does for memory: it recovers without a restart."""
        try:
            recovered = self._databases.source.kill_backend(fault.choice)
        except psycopg.Error:
            return Blow("the database was not there", harmless=True)
        return Blow(f"recovered after {recovered:.1f} s, not restarted")

    def _crash_reporting(self, fault: Fault) -> Blow:
        server = self._databases.reporting
        return Blow("there is none", harmless=True) if server is None else _crash(server, fault)

    def _fill_disk(self, fault: Fault) -> Blow:
        server = self._databases.source
        server.fill(leave=int(fault.amount))
        time.sleep(fault.seconds)
        was_up = server.is_running()
        server.free()
        return Blow("the server stayed up" if was_up else "the server ended and was started")

    def _crash_broker(self, fault: Fault) -> Blow:
        if self._rabbitmq is None:
            return Blow("there is none", harmless=True)
        self._rabbitmq.stop()
        time.sleep(fault.seconds)
        for attempt in range(1, BROKER_STARTS + 1):
            try:
                self._rabbitmq.start()
            except AssertionError:  # as a supervisor would: it gave up by itself, or took too long on a busy machine
                self._rabbitmq.stop()
                if attempt == BROKER_STARTS:
                    raise
            else:
                break
        return Blow(f"SIGKILL of its node, back at start {attempt}")

    def _freeze_kafka(self, fault: Fault) -> Blow:
        if self._kafka is None:
            return Blow("there is none", harmless=True)
        with self._kafka.frozen():
            time.sleep(fault.seconds)
        return Blow("SIGSTOP of its process")

    def _crash_kafka(self, fault: Fault) -> Blow:
        if self._kafka is None:
            return Blow("there is none", harmless=True)
        self._kafka.stop()
        time.sleep(fault.seconds)
        self._kafka.start()
        return Blow("SIGKILL of its process")

    def _connect(self, fault: Fault) -> psycopg.Connection[Any]:
        return self._databases.home(self._pods[fault.case].case).connect()


def _blow(case: Case, victim: Victim) -> Blow:
    """Say what stands still when a process does: its partitions or, where nothing is divided, what it has in hand."""
    harmless = not (victim.partitions if case.fenced else victim.messages)
    in_hand = f" with {len(victim.messages)} messages in hand" if victim.messages else ""
    return Blow(victim.pod.name + in_hand, victim.partitions, harmless, victim.messages)


def _crash(server: Postgres, fault: Fault) -> Blow:
    server.crash()
    time.sleep(fault.seconds)
    server.start()
    return Blow("pg_ctl stop -m immediate")


def _nobody() -> Blow:
    return Blow("nobody was alive", harmless=True)


def _proxy(fault: Fault) -> str:
    return f"{fault.case}-{'target' if fault.target else 'source'}"
