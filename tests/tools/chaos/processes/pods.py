"""The worker processes of one case, kept at a number and rolled out as a Deployment would; no name is used twice."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from tests.support.cache import find_cached
from tests.support.worker import Workers
from tests.tools.chaos.cases import Target
from tests.tools.chaos.config import build_config, build_handler

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.worker import Worker
    from tests.tools.chaos.cases import Case

STOP_SECONDS: Final = 30.0
"""Of grace, as a pod has."""
ROLL_SECONDS: Final = 0.7
"""Between two processes of a rollout."""
ENDED_BY_SIGTERM: Final = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""By the kernel, before the process asked to be told of it; by its own handler, from then on."""
_FIRST_PORT: Final = 10_001
_ports = iter(range(_FIRST_PORT, 20_000))


def shim() -> Path:
    """Return the library that steps a process's clock."""
    return find_cached("chaos", "bin", "stepclock.so")


@dataclass
class Pod:
    """One worker process."""

    name: str
    worker: Worker
    clock: Path
    generation: int = 1
    """Of the text that it was started from."""
    held: bool = False
    """By a fault that has it frozen: it is nobody else's victim."""

    def is_alive(self) -> bool:
        return self.worker.process.poll() is None

    def answers(self) -> bool:
        """Whether it has come up so far that it says how it is: Python has started, and read the configuration."""
        with contextlib.suppress(OSError):
            return bool(self.worker.get("/status"))
        return False

    def step_clock(self, seconds: float) -> None:
        """Set the wall clock off by so much, in all."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("=q", int(seconds * 1e9)))

    def read_clock(self) -> float | None:
        """Return what the process itself takes for the time, in seconds since 1970, if it answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.worker.port}/livez", timeout=5) as answer:
                return parsedate_to_datetime(answer.headers["Date"]).timestamp()
        except urllib.error.HTTPError as error:
            with error:
                return parsedate_to_datetime(error.headers["Date"]).timestamp()
        except (OSError, http.client.HTTPException):
            return None


class Pods:
    """All worker processes of a case."""

    def __init__(self, case: Case, directory: Path, source: str, target: Mapping[str, str]) -> None:
        """Keep where the messages are, and the keys of the target's Secret; start nothing."""
        self.case = case
        self.wanted = case.replicas
        self.partitions = case.partitions
        self._generation = 1
        self.ended_by_themselves: list[str] = []
        self.started = 0
        self._source, self._target = source, target
        self._workers = Workers(directory)
        self._directory = directory
        self._pods: list[Pod] = []
        self._lock = threading.RLock()
        self._not_before = self._roll_at = 0.0
        directory.mkdir()

    def alive(self) -> list[Pod]:
        """Return the living that no fault has in its hands, the oldest first."""
        with self._lock:
            return [pod for pod in self._pods if pod.is_alive() and not pod.held]

    def has_one_that_answers(self) -> bool:
        return any(pod.answers() for pod in self.alive())

    def keep(self) -> None:
        """Bring the number to what is wanted. Who ended without being asked is written down, and replaced."""
        with self._lock:
            for pod in [pod for pod in self._pods if not pod.is_alive()]:
                self._pods.remove(pod)
                self.ended_by_themselves.append(f"{pod.name} ended by itself with {pod.worker.process.returncode}")
            while len(self._pods) < self.wanted and time.monotonic() >= self._not_before:
                self._start()
            for pod in [pod for pod in self._pods if not pod.held][: max(0, len(self._pods) - self.wanted)]:
                self._let_go(pod)
            former = [pod for pod in self._pods if pod.generation < self._generation and not pod.held]
            if former and time.monotonic() >= self._roll_at:
                self._roll_at = time.monotonic() + ROLL_SECONDS
                self._let_go(former[0])

    def change_partitions(self, count: int) -> None:
        """Change the resource: its processes are replaced one after the other."""
        with self._lock:
            self.partitions = count
            self._generation += 1

    def _let_go(self, pod: Pod) -> None:
        self._pods.remove(pod)
        threading.Thread(target=self._terminate, args=(pod,), daemon=True).start()

    def _start(self) -> None:
        self.started += 1
        name = f"worker-{self.started}"  # short: with the case's it is the connection's name, of which 63 bytes count
        if self.case.companions:  # a session of several processors is named by its pod alone
            name = f"{self.case.name}.{name}"
        clock = self._directory / f"clock-{self.started}"
        clock.write_bytes(bytes(8))
        handler = build_handler(self.case) if self.case.target is Target.PYTHON else None
        config = build_config(self.case, partitions=self.partitions, generation=self._generation)
        home = self._workers.prepare(config, self._source, handler=handler)
        for key, value in self._target.items():
            (home / "connections/target" / key).write_text(value)
        environment = {"LD_PRELOAD": str(shim()), "STEPCLOCK_FILE": str(clock)}
        port = next(_ports)
        arguments = ["--port", str(port), *(self._share(home) if self.case.companions else ())]
        worker = self._workers.launch(home, *arguments, pod=name, environment=environment)
        worker.port = port
        self._pods.append(Pod(name, worker, clock, self._generation))

    def _share(self, home: Path) -> list[str]:
        """Write the files of a process with several processors; return the arguments that name them."""
        (home / "processors").mkdir()
        for case in (self.case, *self.case.companions):
            config = build_config(case, generation=self._generation)
            (home / "processors" / f"{case.name}.json").write_text(json.dumps(config))
        for secret, directory in (("db", "source"), ("broker", "target")):
            (home / "connections" / secret).symlink_to(home / "connections" / directory)
        return ["--processors", str(home / "processors")]

    def kill(self, pod: Pod, *, restart_after: float) -> None:
        """SIGKILL, and a new one no sooner than so many seconds from now."""
        with self._lock:
            self._not_before = time.monotonic() + restart_after
            if pod in self._pods:
                self._pods.remove(pod)
            pod.worker.kill()

    def freeze(self, pod: Pod) -> None:
        pod.held = True
        pod.worker.send(signal.SIGSTOP)

    def thaw(self, pod: Pod) -> None:
        if pod.is_alive():
            pod.worker.send(signal.SIGCONT)
        pod.held = False

    def stop(self) -> None:
        """Ask all to stop, and wait."""
        with self._lock:
            self.wanted = 0
            threads = [threading.Thread(target=self._terminate, args=(pod,)) for pod in self._pods]
            self._pods = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def describe(self) -> list[str]:
        """Say what each process says of itself, for a run that does not come to its end."""
        said = []
        for pod in self.alive():
            try:
                reports = pod.worker.reports().values() if self.case.companions else [pod.worker.report()]
                said += [f"{pod.name}, {one.processor_id}: {one.state} {one.reason}: {one.message}" for one in reports]
            except (OSError, ValueError) as error:
                said.append(f"{pod.name}: no report ({error})")
        return said

    def _terminate(self, pod: Pod) -> None:
        try:
            status = pod.worker.terminate(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.ended_by_themselves.append(f"{pod.name} did not end within {STOP_SECONDS:g} s of SIGTERM")
            pod.worker.kill()
        else:
            # One that has not come to say "started" was ended by the signal, while it still imported: it did nothing.
            if status != 0 and not (status in ENDED_BY_SIGTERM and '"started"' not in pod.worker.log()):
                self.ended_by_themselves.append(f"{pod.name} ended with {status} after SIGTERM")
