"""A Prometheus server on this machine that scrapes pods as the chart's monitors say; the server is Debian's.

The monitors are read as the Prometheus operator reads them: which objects they select, what is shown to them, and which
labels their series get. Debian's build cannot ask Kubernetes for targets, so they are listed here, with the labels that
Prometheus' own discovery gives them; its relabelling then selects.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.support.kubernetes.cluster import wait
from tests.support.servers.postgres import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body, Cluster

INTERVAL = "1s"


def job_of(monitor: Body, credentials: Path, targets: Path) -> Body:
    """Build the scrape job of a PodMonitor or ServiceMonitor; `credentials` holds what its Secret does."""
    spec, meta = monitor["spec"], monitor["metadata"]
    (endpoint,) = spec["podMetricsEndpoints" if _is_of_pods(monitor) else "endpoints"]
    selected, port = ("pod", "pod_container") if _is_of_pods(monitor) else ("service", "endpoint")
    wanted = dict(spec["selector"].get("matchLabels", {}))
    for each in spec["selector"].get("matchExpressions", ()):
        assert each["operator"] == "In"
        wanted[each["key"]] = f"({'|'.join(each['values'])})"
    relabelings = [
        *(_keep(f"{selected}_label_{_label(key)}", value) for key, value in wanted.items()),
        _keep(f"{port}_port_name", endpoint["port"]),
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        *(
            {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]}
            for each in endpoint.get("relabelings", ())
        ),
    ]
    job = {
        "job_name": f"{meta['namespace']}/{meta['name']}",
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False),
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": INTERVAL}],
        "relabel_configs": relabelings,
        "metric_relabel_configs": [
            {"source_labels": each["sourceLabels"], "regex": each["regex"], "target_label": each["targetLabel"]}
            for each in endpoint.get("metricRelabelings", ())
        ],
    }
    if "authorization" in endpoint:
        job["authorization"] = {"type": "Bearer", "credentials_file": str(credentials)}
    return job


def _is_of_pods(monitor: Body) -> bool:
    return bool(monitor["kind"] == "PodMonitor")


def _label(key: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in key)


def _keep(source: str, pattern: str) -> Body:
    return {"source_labels": [f"__meta_kubernetes_{source}"], "regex": pattern, "action": "keep"}


def list_targets(cluster: Cluster, monitor: Body) -> list[Body]:
    """List every port of every pod, or of every Service, where a monitor looks."""
    meta = monitor["metadata"]
    namespaces = monitor["spec"].get("namespaceSelector", {}).get("matchNames", [meta["namespace"]])
    list_ports = _ports_of_pods if _is_of_pods(monitor) else _ports_of_services
    return [
        {
            "targets": [address],
            "labels": {f"__meta_kubernetes_{key}": value for key, value in {**labels, "namespace": namespace}.items()},
        }
        for namespace in namespaces
        for address, labels in list_ports(cluster, namespace)
    ]


def _ports_of_pods(cluster: Cluster, namespace: str) -> Iterator[tuple[str, dict[str, str]]]:
    for pod in cluster.items("Pod", namespace):
        meta, address = pod["metadata"], pod["status"].get("podIP")
        for port in (port for container in pod["spec"]["containers"] for port in container.get("ports", ())):
            labels = {f"pod_label_{_label(key)}": value for key, value in meta.get("labels", {}).items()}
            labels |= {"pod_name": meta["name"], "pod_container_port_name": port.get("name", "")}
            if address and pod["status"]["phase"] == "Running":
                yield f"{address}:{port['containerPort']}", labels


def _ports_of_services(cluster: Cluster, namespace: str) -> Iterator[tuple[str, dict[str, str]]]:
    services = {body["metadata"]["name"]: body for body in cluster.items("Service", namespace)}
    for piece in cluster.items("EndpointSlice", namespace):
        service = services[piece["metadata"]["labels"]["kubernetes.io/service-name"]]
        labels = {f"service_label_{_label(key)}": text for key, text in service["metadata"].get("labels", {}).items()}
        for port in piece.get("ports") or ():
            for each in piece.get("endpoints") or ():
                more = {"endpoint_port_name": port["name"], "pod_name": each.get("targetRef", {}).get("name", "")}
                yield f"{each['addresses'][0]}:{port['port']}", labels | more


@dataclass
class Prometheus:
    """One server that scrapes what these monitors select, with these rules. A context manager starts and stops it."""

    cluster: Cluster
    folder: Path
    monitors: list[Body]
    credentials: Path
    rules: Body
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _lister: threading.Thread | None = None

    def __enter__(self) -> Self:
        program = shutil.which("prometheus")
        assert program, "prometheus is not there: run tests/tools/cluster/setup.sh monitoring"
        (self.folder / "rules.yaml").write_text(yaml.safe_dump(self.rules))
        jobs = [job_of(each, self.credentials, self._targets_of(each)) for each in self.monitors]
        self._list_targets()
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(self.folder / "rules.yaml")],
            "scrape_configs": jobs,
        }
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        command = [
            program,
            f"--config.file={self.folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]
        with (self.folder / "prometheus.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._lister = threading.Thread(target=self._keep_listing, daemon=True)
        self._lister.start()
        wait("Prometheus", self._answers, within=30, explain=self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._lister is not None:
            self._lister.join(timeout=30)
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)

    def _targets_of(self, monitor: Body) -> Path:
        return self.folder / f"{monitor['kind']}.json"

    def _list_targets(self) -> None:
        for monitor in self.monitors:
            path = self._targets_of(monitor)
            made = path.with_suffix(".new")
            made.write_text(json.dumps(list_targets(self.cluster, monitor)))
            made.rename(path)

    def _keep_listing(self) -> None:
        """Follow pods that come and go."""
        while not self._stop.wait(1):
            self._list_targets()

    def _answers(self) -> bool:
        try:
            self.get("status/buildinfo")
        except URLError:
            return False
        return True

    def _log(self) -> str:
        return (self.folder / "prometheus.log").read_text()

    def get(self, path: str, **parameters: str) -> Any:
        """Ask its API.

        Raises:
            HTTPError: it refused, as it does an expression that it cannot read.

        """
        with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Body]:
        """Evaluate an expression now: its series."""
        found: list[Body] = self.get("query", query=expression)["result"]
        return found

    def targets(self) -> list[Body]:
        """What it scrapes."""
        found: list[Body] = self.get("targets")["activeTargets"]
        return found

    def alerts(self) -> dict[str, Body]:
        """Its rules by name, with their health and state."""
        groups = self.get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}
