"""One run: start everything, strike as the schedule says, let it come to rest, and judge."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from tests.chaos.cases import Target
from tests.chaos.evidence import Journal, collect, effect_times, read_final
from tests.chaos.faults import Faults
from tests.chaos.pods import Pods
from tests.chaos.proxies import Proxies
from tests.chaos.recovery import measure
from tests.chaos.schedule import LAST
from tests.chaos.servers import PORT, Postgres
from tests.chaos.summary import format_ledger, format_recoveries, format_violations
from tests.chaos.verdict import check_judge, find_not_at_end, judge
from tests.ledger.commitlog import read_commit_logs
from tests.support.postgres import wait_until
from tests.support.rabbitmq import RabbitmqServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.cases import Case
    from tests.chaos.schedule import Fault
    from tests.chaos.verdict import Evidence
    from tests.ledger.commitlog import Committed

PRODUCERS: Final = 3
CHECKOUT: Final = Path(__file__).resolve().parents[2]
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of our own network namespace."""
START_SECONDS: Final = 90.0
DRAIN_SECONDS: Final = 120.0
SUPERVISE_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    seed: int
    seconds: float
    cases: Sequence[Case]
    schedule: Sequence[Fault]
    directory: Path
    sabotage: str = ""


class Director:
    """Everything that runs, from start to end."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """Start the servers and the workers, and wait until each case has an owner."""
        self._plan, self._say = plan, say
        megabytes = int(320 + 0.4 * plan.seconds)
        servers = plan.directory / "servers"
        servers.mkdir()
        servers.chmod(0o755)
        self._postgres = Postgres(servers, megabytes=megabytes)
        self._postgres.prepare(plan.cases, plan.sabotage)
        self._broker = _start_broker() if any(case.target is Target.RABBITMQ for case in plan.cases) else None
        self._proxies = Proxies(plan.directory / "toxiproxy.log")
        self._pods = {case.name: self._make_pods(case) for case in plan.cases}
        self._faults = Faults(self._postgres, self._broker, self._proxies, self._pods, plan.directory / "faults.jsonl")
        self._resting, self._closing = threading.Event(), threading.Event()
        self._failures: list[str] = []
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()
        for case in plan.cases:
            wait_until(lambda case=case: self._is_owned(case), f"{case.name} has an owner", START_SECONDS)  # type: ignore[misc]

    def _make_pods(self, case: Case) -> Pods:
        port = self._proxies.add(f"{case.name}-database", PORT)
        source = f"postgresql://postgres@127.0.0.1:{port}/outbox?sslmode=disable"
        target = None
        if case.target is Target.RABBITMQ and self._broker is not None:
            with self._broker.client() as client:
                for queue in ("ledger", "tap"):
                    client.declare(f"{queue}-{case.name}", case.name)
            through = self._proxies.add(f"{case.name}-broker", self._broker.port)
            target = self._broker.uri.replace(f":{self._broker.port}/", f":{through}/")
        return Pods(case, self._plan.directory / case.name, source, target)

    def _is_owned(self, case: Case) -> bool:
        with self._postgres.connect(case.database) as connection:
            row = connection.execute(
                "SELECT count(*) FROM outbox.processor_leases "
                "WHERE processor_id = %s AND expires_at > clock_timestamp()",
                [case.name],
            ).fetchone()
        return row is not None and (row[0] >= case.partitions or not case.fenced)

    def _supervise(self) -> None:
        while not self._resting.wait(SUPERVISE_SECONDS):
            for pods in self._pods.values():
                pods.keep()

    def run(self) -> bool:
        """Run to the end; say whether every promise was kept.

        Raises:
            RuntimeError: chaos itself failed, so nothing can be said.

        """
        began = time.time()
        observer = self._start_observer()
        producers = [self._start_producer(number) for number in range(PRODUCERS)]
        self._strike_all(time.monotonic())
        if self._failures:
            raise RuntimeError("\n".join(self._failures))
        self._heal()
        for process in producers:
            _end(process, "a producer")
        produced = read_commit_logs(self._plan.directory / "produced")
        self._say(f"the producers committed {len(produced):,} messages; waiting until all are handled")
        stuck = self._drain(produced)
        self._resting.set()
        self._supervisor.join()
        for pods in self._pods.values():
            pods.stop()
        time.sleep(0.2)  # the observer's last look
        _end(observer, "the observer")
        return self._judge(produced, began, stuck)

    def _start_observer(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.observer", "--server", self._postgres.uri("").rstrip("/")]
        command += ["--journal", str(self._plan.directory / "observed.jsonl")]
        command += [f"--case={case.name}" for case in self._plan.cases]
        if self._broker is not None:
            command += ["--broker", str(self._broker.port)]
        return subprocess.Popen(command, cwd=CHECKOUT)

    def _start_producer(self, number: int) -> subprocess.Popen[bytes]:
        log_dir = self._plan.directory / "produced"
        log_dir.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.chaos.producer", "--uri", self._postgres.uri("outbox")]
        command += ["--number", str(number), "--seed", str(self._plan.seed), "--log-dir", str(log_dir)]
        return subprocess.Popen(command, cwd=CHECKOUT)

    def _strike_all(self, began: float) -> None:
        """Let every lane do its faults, one after the other; return when all are over and production's time is up."""
        lanes: dict[str, list[Fault]] = {}
        for fault in self._plan.schedule:
            lanes.setdefault(fault.case, []).append(fault)
        over = {lane: threading.Event() for lane in lanes}
        for lane, faults in lanes.items():
            threading.Thread(target=self._run_lane, args=(faults, began, over[lane]), daemon=True).start()
        for event in over.values():
            event.wait()
        time.sleep(max(0.0, began + self._plan.seconds - time.monotonic()))

    def _run_lane(self, faults: Sequence[Fault], began: float, over: threading.Event) -> None:
        for fault in faults:
            time.sleep(max(0.0, began + fault.at - time.monotonic()))
            self._strike(fault, began)
        over.set()
        # The kernel ends a server of ours together with the thread that started it.
        self._closing.wait()

    def _strike(self, fault: Fault, began: float) -> None:
        at = time.monotonic() - began
        if at > self._plan.seconds - LAST / 2:
            self._say(f"{at:7.1f} s  {fault.case or 'all'}: {fault.kind}: left out, this machine is too slow for it")
            return
        try:
            struck = self._faults.strike(fault)
        except Exception as error:  # noqa: BLE001  # told at the end of the run, which then says nothing of the product
            self._failures.append(f"{fault.kind} at {fault.at} s could not be carried out: {error!r}")
            return
        lasted = f" for {struck.ended - struck.began:.1f} s" if fault.seconds else ""
        self._say(f"{at:7.1f} s  {fault.case or 'all'}: {fault.kind}{lasted} ({struck.note})")

    def _heal(self) -> None:
        self._proxies.reset()
        self._postgres.free()

    def _drain(self, produced: Sequence[Committed]) -> dict[str, list[str]]:
        """Wait until every checkpoint is at the last message; return what those say that do not get there."""
        stuck = {}
        deadline = time.monotonic() + DRAIN_SECONDS
        for case in self._plan.cases:
            with contextlib.suppress(AssertionError):
                wait_until(
                    lambda case=case: self._is_drained(case, produced),  # type: ignore[misc]
                    f"{case.name} has handled everything",
                    max(1.0, deadline - time.monotonic()),
                )
                continue
            stuck[case.name] = [f"did not come to its end within {DRAIN_SECONDS:g} s"]
            stuck[case.name] += self._pods[case.name].describe()
        return stuck

    def _is_drained(self, case: Case, produced: Sequence[Committed]) -> bool:
        if case.ends_at_last:
            return not find_not_at_end(case, produced, read_final(self._postgres, case))
        with self._postgres.connect(case.database) as connection:
            row = connection.execute(f"SELECT count(DISTINCT message_id) FROM chaos.{case.table}").fetchone()
        return row is not None and row[0] >= len(produced)

    def _judge(self, produced: Sequence[Committed], began: float, stuck: dict[str, list[str]]) -> bool:
        journal = Journal(self._plan.directory / "observed.jsonl", began)
        broker = None if self._broker is None else self._broker.client()
        evidence = {
            case.name: collect(case, self._postgres, broker, journal, self._pods[case.name])
            for case in self._plan.cases
        }
        for name, complaints in stuck.items():
            evidence[name] = _with_complaints(evidence[name], complaints)
        verdicts = [judge(case, produced, evidence[case.name]) for case in self._plan.cases]
        random = Random(self._plan.seed)
        overlooked = [
            f"{case.name}: {what}"
            for case in self._plan.cases
            for what in check_judge(case, produced, evidence[case.name], random)
        ]
        recoveries = measure(
            self._faults.struck,
            self._plan.cases,
            {name: effect_times(found.effects, began) for name, found in evidence.items()},
        )
        lines = ["", *format_ledger(verdicts, self._faults.struck, recoveries), ""]
        lines += [*format_recoveries(self._faults.struck, recoveries), ""]
        found = "each was found" if not overlooked else "NOT all were found"
        lines.append(f"Self-test: a loss, a double, a swap, a stranger, a step back, a second owner: {found}.")
        lines += [f"OVERLOOKED {what}" for what in overlooked]
        lines += format_violations(verdicts)
        (self._plan.directory / "ledger.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            self._say(line)
        return not overlooked and not any(verdict.violations for verdict in verdicts)

    def close(self) -> None:
        """Leave no server's files behind; processes would end with this one's namespaces anyhow."""
        self._resting.set()
        self._closing.set()
        self._postgres.close()
        if self._broker is not None:
            self._broker.close()


def _start_broker() -> RabbitmqServer:
    # While it is down, nobody's outgoing connection may get one of its ports: they come from a range of their own.
    PORT_RANGE.write_text("50000 59999")
    broker = RabbitmqServer()
    PORT_RANGE.write_text("32768 49999")
    return broker


def _with_complaints(evidence: Evidence, complaints: Sequence[str]) -> Evidence:
    return replace(evidence, complaints=[*evidence.complaints, *complaints])


def _end(process: subprocess.Popen[bytes], what: str) -> None:
    """SIGTERM, and wait.

    Raises:
        RuntimeError: it had ended before, or ended badly.

    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    status = process.wait(30)
    if status != 0:
        raise RuntimeError(f"{what} ended with status {status}")
