"""Measures what the operator costs with many resources, as a Markdown table: `make scale SUSPENDED=2000 RUNNING=300`.

The operator runs as it ships, with its service account, against the real API server through a proxy that counts its
calls. Suspended resources have no pods; running ones have a pod that no node takes. Nothing of it handles messages.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from tests.support.kubernetes.api_proxy import ApiProxy
from tests.support.kubernetes.cluster import Cluster, ensure_cluster, install_crd, namespaces, wait
from tests.support.kubernetes.operator import OperatorProcess, installed
from tests.support.manifests import manifest, worker
from tests.support.processes import memory_mb
from tests.tools.bench.machine import STOLEN, measure_others
from tests.tools.bench.processes import cpu_of_tree

if TYPE_CHECKING:
    from collections import Counter

Body = dict[str, Any]
NEW = 100
"""New resources, one after the other, of which each first status is timed."""
STEP = 0.25
"""Seconds between two of them."""
QUIET = 5.0
"""Seconds without a write after which the operator has settled."""
PATIENCE = 900.0
LONGEST_UNREST = 30.0
"""Seconds after which it is measured although the operator still writes."""
BUSY = 0.25
"""Part of the processors that others may use before the measurement is refused."""
NO_NODE = {"podTemplate": {"spec": {"nodeSelector": {"node": "of-nobody"}}}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suspended", type=int, default=2000, help="resources without pods")
    parser.add_argument("--running", type=int, default=300, help="resources with a pod that no node takes")
    parser.add_argument("--seconds", type=float, default=300, help="how long the idle operator is watched")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    given = parser.parse_args()
    others = measure_others(5.0)
    if (others.foreign > BUSY or others.stolen > STOLEN) and not given.force:
        print(
            f"the machine is busy ({others.foreign:.0%} used, {others.stolen:.0%} stolen): figures would mislead; "
            "FORCE=1 measures"
        )
        return 1
    ensure_cluster()
    cluster = Cluster()
    install_crd(cluster)
    with namespaces(cluster, "system", "scale", prefix="scale") as (system, served):
        figures = measure(cluster, system, served, given)
    figures["machine"] = (
        f"{os.cpu_count()} processors, others used {others.foreign:.0%} of them before, {others.stolen:.0%} were stolen"
    )
    print_table(figures)
    return 0


def measure(cluster: Cluster, system: str, served: str, given: argparse.Namespace) -> dict[str, str]:
    """Run the operator on this machine, and measure it."""
    with (
        installed(cluster, system, [served], pods=0) as release,
        ApiProxy(cluster) as proxy,
        tempfile.TemporaryDirectory() as folder,
    ):
        operator, log = OperatorProcess(release, Path(folder), server=proxy.url), Path(folder) / "operator.log"
        try:
            figures = Scale(cluster, served, proxy, operator, given.suspended, given.running).measure(given.seconds)
        except BaseException:
            say(log.read_text()[-3000:])
            raise
        finally:
            operator.stop()
        figures["restarts that nobody asked for"] = str(log.read_text().count("the Lease is lost"))
        return figures


@dataclass
class Scale:
    """One measurement, from no resource to all of them."""

    cluster: Cluster
    namespace: str
    proxy: ApiProxy
    operator: OperatorProcess
    suspended: int
    running: int
    figures: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, value: str) -> None:
        """Keep a figure, and say it: the whole takes minutes."""
        self.figures[name] = value
        say(f"{name}: {value}")

    def measure(self, seconds: float) -> dict[str, str]:
        """Measure one thing after the other."""
        everything = self.suspended + self.running
        self.note("resources", f"{self.suspended} suspended, {self.running} with a pod that no node takes")
        self.operator.start()
        began = time.monotonic()
        with FirstStatus(self.cluster, self.namespace) as told:
            self._make()
            say(f"{everything} resources are made")
            wait("every resource has a status", lambda: len(told.times) >= everything, within=PATIENCE)
        self.note("all have their first status, made at once", f"{time.monotonic() - began:.0f} s")
        # Controllers and scheduler take minutes for them: until then the operator has something to tell.
        wait("the scheduler has looked at every pod", lambda: self._count_untaken() >= self.running, within=PATIENCE)
        self._until_quiet()

        self.operator.stop()
        self.proxy.written.clear()
        began = time.monotonic()
        self.operator.start()
        wait("every resource is decided", lambda: self._decided() >= everything, within=PATIENCE)
        settled = self._until_quiet() - began
        self.note("settled after a restart", f"{settled:.0f} s")
        self.note("writes after a restart", str(self._writes()))

        times = self._time_new()
        p50, p99 = quantiles(times, n=100)[49], quantiles(times, n=100)[98]
        self.note("first status of a new resource", f"p50 {p50:.2f} s, p99 {p99:.2f} s")
        self._until_quiet()

        self._watch_idle(seconds)
        return self.figures

    def _make(self) -> None:
        names = [f"suspended-{number}" for number in range(self.suspended)]
        idle = [manifest(self.namespace, worker(suspend=True), name) for name in names]
        specs = [worker(worker=NO_NODE) for _ in range(self.running)]
        waiting = [manifest(self.namespace, spec, f"running-{number}") for number, spec in enumerate(specs)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.cluster.create, idle + waiting))

    def _count_untaken(self) -> int:
        time.sleep(2)
        pods = self.cluster.call("GET", self.cluster.path("Pod", self.namespace))["items"]
        return sum(
            condition["type"] == "PodScheduled" and condition["status"] == "False"
            for pod in pods
            for condition in pod["status"].get("conditions", ())
        )

    def _decided(self) -> float:
        time.sleep(0.5)
        return self.operator.metrics().get("outbox_operator_reconcile_seconds_count", 0)

    def _until_quiet(self) -> float:
        """Wait until nothing was written for a while; answer when the last write was seen."""
        last, since = self._writes(), time.monotonic()
        deadline = since + LONGEST_UNREST
        while time.monotonic() - since < QUIET:
            time.sleep(0.25)
            if (now := self._writes()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() > deadline:
                say(f"it does not cease to write: {dict(self.proxy.written)}")
                break
        return since

    def _writes(self) -> int:
        return sum(count for (_, kind), count in self.proxy.written.copy().items() if kind != "leases")

    def _time_new(self) -> list[float]:
        made: dict[str, float] = {}
        with FirstStatus(self.cluster, self.namespace) as told:
            for number in range(NEW):
                body = manifest(self.namespace, worker(suspend=True), f"new-{number}")
                made[body["metadata"]["name"]] = time.monotonic()
                self.cluster.create(body)
                time.sleep(STEP)
            wait("new resources have a status", lambda: made.keys() <= told.times.keys(), within=PATIENCE)
            return [told.times[name] - when for name, when in made.items()]

    def _watch_idle(self, seconds: float) -> None:
        say(f"watching the idle operator for {seconds:.0f} s")
        process = self.operator.process
        assert process is not None
        self.proxy.calls.clear()
        began, used = time.monotonic(), cpu_of_tree(process.pid)
        time.sleep(seconds)
        lasted = time.monotonic() - began
        used = cpu_of_tree(process.pid) - used
        self.note(f"processor, idle for {seconds:.0f} s", f"{used / lasted:.3f} of a core")
        now, peak = memory_mb(process.pid, "resident"), memory_mb(process.pid, "peak")
        self.note("memory", f"{now:.0f} MB resident, at most {peak:.0f} MB")
        self.note("calls a minute, idle", _per_minute(self.proxy.calls, lasted))


def _per_minute(calls: Counter[tuple[str, str]], lasted: float) -> str:
    each = ", ".join(f"{verb} {kind} {count * 60 / lasted:.1f}" for (verb, kind), count in sorted(calls.items()))
    return f"{sum(calls.values()) * 60 / lasted:.1f} ({each})"


def is_told(body: Body) -> bool:
    """Whether a status is of its generation."""
    generation: int = body["metadata"]["generation"]
    return generation == (body.get("status") or {}).get("observedGeneration")


class FirstStatus:
    """Watches resources from now on, and keeps when the first status of each was seen."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        path = cluster.path("OutboxProcessor", namespace)
        version = cluster.call("GET", f"{path}?limit=1")["metadata"]["resourceVersion"]
        self.times: dict[str, float] = {}
        configuration = cluster._api.configuration
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        server = urlsplit(cluster.server)
        self._connection = http.client.HTTPSConnection(server.hostname or "", server.port, context=context)
        token = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        headers = {"Authorization": token} if token else {}
        self._connection.request("GET", f"{path}?watch=true&resourceVersion={version}", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == http.HTTPStatus.OK, self._answer.read()
        self._reading = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._reading.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not close: that would wait for the thread that reads.
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._reading.join()
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError, AttributeError, http.client.HTTPException):  # it was closed
            for line in self._answer:
                body = json.loads(line)["object"]
                if is_told(body):
                    self.times.setdefault(body["metadata"]["name"], time.monotonic())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(figures: dict[str, str]) -> None:
    print("| | |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    sys.exit(main())
