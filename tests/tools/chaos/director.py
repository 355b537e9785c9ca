"""One run: start everything, strike as the schedule says, let it come to rest, and judge."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from tests.support.servers.postgres import wait_until
from tests.tools.chaos.brokers import Brokers
from tests.tools.chaos.evidence import (
    Journal,
    collect,
    count_handled,
    read_complaints,
    read_final,
    read_unexamined,
    see,
)
from tests.tools.chaos.faults import Faults
from tests.tools.chaos.processes.pods import Pods
from tests.tools.chaos.processes.proxies import Proxies
from tests.tools.chaos.recovery import find_late, measure
from tests.tools.chaos.result import build_result
from tests.tools.chaos.schedule import LAST, find_not_struck
from tests.tools.chaos.servers import Databases
from tests.tools.chaos.summary import format_result
from tests.tools.chaos.verdict import Evidence, check_judge, find_missing, find_not_at_end, judge
from tests.tools.ledger.commitlog import count_overtaken, read_commit_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.schedule import Fault
    from tests.tools.ledger.commitlog import Committed

PRODUCERS: Final = 3
CHECKOUT: Final = Path(__file__).resolve().parents[3]
RESULT: Final = "result.json"
BURNED: Final = (0, 200_000)
"""Transaction ids that the other server is ahead: either is beyond the other one by that, and neither may matter."""
_OWNED: Final = """
SELECT count(*) FROM outbox.processor_leases WHERE processor_id = %s AND expires_at > clock_timestamp()
"""
_BEGUN: Final = "SELECT count(*) FROM outbox.competing_processors WHERE processor_id = %s"
START_SECONDS: Final = 180.0
DRAIN_SECONDS: Final = 60.0
DRAIN_LOOK_SECONDS: Final = 0.5
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
        self._databases = Databases(
            servers, plan.cases, megabytes=megabytes, sabotage=plan.sabotage,
            burned=Random(plan.seed).choice(BURNED),
        )  # fmt: skip
        self._proxies = Proxies(plan.directory / "toxiproxy.log")
        self._brokers = Brokers(plan.cases, self._proxies, plan.directory, START_SECONDS)
        self._pods = {case.name: self._make_pods(case) for case in plan.cases}
        self._faults = Faults(
            self._databases, self._brokers, self._proxies, self._pods, plan.directory / "faults.jsonl"
        )
        self._resting, self._closing = threading.Event(), threading.Event()
        self._failures: list[str] = []
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()
        for case in plan.cases:
            wait_until(lambda case=case: self._is_owned(case), f"{case.name} has an owner", START_SECONDS)  # type: ignore[misc]

    def _make_pods(self, case: Case) -> Pods:
        port = self._proxies.add(f"{case.name}-source", self._databases.way_to_source(case))
        source, target = self._databases.source.uri(port=port), self._brokers.prepare(case)
        if case.apart:
            home = self._databases.home(case)
            target = {"uri": home.uri(port=self._proxies.add(f"{case.name}-target", home.port))}
        return Pods(case, self._plan.directory / case.name, source, target)

    def _is_owned(self, case: Case) -> bool:
        with self._databases.home(case).connect() as connection:
            ((count,),) = connection.execute(_OWNED if case.fenced else _BEGUN, [case.name]).fetchall()
        return int(count) >= (case.partitions if case.fenced else 1)

    def _supervise(self) -> None:
        while not self._resting.wait(SUPERVISE_SECONDS):
            for pods in self._pods.values():
                pods.keep()

    def run(self) -> int:
        """Run to the end; return the exit code of `Result.status`.

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
        command = [sys.executable, "-m", "tests.tools.chaos.processes.observer"]
        command += ["--source", self._databases.source.uri()]
        if self._databases.reporting is not None:
            command += ["--reporting", self._databases.reporting.uri()]
        command += ["--journal", str(self._plan.directory / "observed.jsonl")]
        command += [f"--case={case.name}" for case in self._plan.cases]
        if self._brokers.rabbitmq is not None:
            command += ["--broker", str(self._brokers.rabbitmq.port)]
        return subprocess.Popen(command, cwd=CHECKOUT)

    def _start_producer(self, number: int) -> subprocess.Popen[bytes]:
        log_dir = self._plan.directory / "produced"
        log_dir.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.tools.chaos.processes.producer", "--uri", self._databases.source.uri()]
        command += ["--number", str(number), "--seed", str(self._plan.seed), "--log-dir", str(log_dir)]
        command += [f"--queue={case.queue}" for case in self._plan.cases if case.queue]
        return subprocess.Popen(command, cwd=CHECKOUT)

    def _strike_all(self, began: float) -> None:
        """Let every lane do its faults, one after the other; return when all are over and production's time is up."""
        lanes: dict[str, list[Fault]] = {}
        for fault in self._plan.schedule:
            lanes.setdefault(fault.lane, []).append(fault)
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
        self._databases.source.free()

    def _drain(self, produced: Sequence[Committed]) -> dict[str, list[str]]:
        """Wait until every case has handled everything; return what those say that do not move any more.

        However slow the machine is, whoever still moves is not stuck.
        """
        left = {case.name: case for case in self._plan.cases}
        places: dict[str, object] = {}
        moved_at = time.monotonic()
        while left and time.monotonic() < moved_at + DRAIN_SECONDS:
            for case in list(left.values()):
                together = (case, *case.companions)
                if all(self._is_drained(one, self._pods[case.name].partitions, produced) for one in together):
                    del left[case.name]
                place = [(read_final(self._databases, one), count_handled(self._databases, one)) for one in together]
                if places.get(case.name) != place:
                    places[case.name], moved_at = place, time.monotonic()
            time.sleep(DRAIN_LOOK_SECONDS)
        return {
            name: [f"came to no end, and nothing moved for {DRAIN_SECONDS:g} s", *self._pods[name].describe()]
            for name in left
        }

    def _is_drained(self, case: Case, partitions: int, produced: Sequence[Committed]) -> bool:
        handled = count_handled(self._databases, case)
        seen = Evidence(
            (), final=read_final(self._databases, case), partitions=partitions,
            unexamined=read_unexamined(self._databases, case, partitions),
        )  # fmt: skip
        return not (
            (handled is not None and handled < len(produced))
            or find_not_at_end(case, produced, seen)
            or read_complaints(self._databases, case, partitions)
        )

    def _judge(self, produced: Sequence[Committed], began: float, stuck: dict[str, list[str]]) -> int:
        cases = self._plan.cases
        journal = Journal(self._plan.directory / "observed.jsonl", began)
        evidence = {
            case.name: collect(case, self._databases, self._brokers, journal, self._pods[case.name]) for case in cases
        }
        struck = self._faults.struck
        recoveries = measure(struck, cases, {case.name: see(evidence[case.name], journal, case) for case in cases})
        for case in cases:
            seen = evidence[case.name]
            complaints = [*seen.complaints, *stuck.get(case.name, ()), *find_late(recoveries, case)]
            complaints += [what for each in case.companions for what in self._judge_companion(each, produced, journal)]
            evidence[case.name] = replace(seen, complaints=complaints)
        verdicts = [judge(case, produced, evidence[case.name]) for case in cases]
        random = Random(self._plan.seed)
        overlooked = [
            f"{case.name}: {what}"
            for case in cases
            for what in check_judge(case, produced, evidence[case.name], random)
        ]
        missing = [what for case in cases for what in find_missing(case, evidence[case.name])]
        result = build_result(
            verdicts, struck, recoveries, overtaken=count_overtaken(produced), overlooked=overlooked,
            missing=[*missing, *find_not_struck(self._plan.schedule, struck)],
        )  # fmt: skip
        (self._plan.directory / RESULT).write_text(json.dumps(asdict(result)) + "\n")
        lines = format_result(result)
        (self._plan.directory / "ledger.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            self._say(line)
        return result.status

    def _judge_companion(self, case: Case, produced: Sequence[Committed], journal: Journal) -> list[str]:
        """Name what is wrong with a processor that shared the processes of a case."""
        seen = collect(case, self._databases, self._brokers, journal)
        return [f"{case.name}: {what}" for what in judge(case, produced, seen).violations]

    def close(self) -> None:
        """Leave no server's files behind; processes would end with this one's namespaces anyhow."""
        self._resting.set()
        self._closing.set()
        if self._databases.pool is not None:
            self._databases.pool.stop()
        for server in self._databases.all():
            server.close()
        self._brokers.close()


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
