"""The real Argo CD on this machine: application controller, repository server and a Redis, over a git repository.

They are processes, not pods, and act on the cluster with the rights of the kubeconfig, as Argo CD's own installation
does. What a person does in its user interface, a test does as its API server would: by the Application's fields.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tests.chart.chart import ROOT, tool
from tests.support.cache import CACHE
from tests.support.kubernetes.cluster import Body, Cluster, kubeconfig, wait
from tests.support.servers.postgres import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS: Final = CACHE / "bin" / "argocd"
EXAMPLES: Final = ROOT / "examples" / "argocd"
KINDS: Final = ("applications", "appprojects")
FINALIZER: Final = "resources-finalizer.argocd.argoproj.io"
API: Final = "argoproj.io/v1alpha1"
SYNCED_WITHIN: Final = 180.0


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository that Argo CD reads; what is committed is what shall be."""

    folder: Path

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), "-c", "user.name=t", "-c", "user.email=t@example.com", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, **files: Body | None) -> str:
        """Commit manifests into the folder `processors`, by their names; None removes one. Answers the revision."""
        place = self.folder / "processors"
        place.mkdir(exist_ok=True)
        for name, manifest in files.items():
            path = place / f"{name}.yaml"
            if manifest is None:
                path.unlink()
            else:
                path.write_text(yaml.safe_dump(manifest))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", ", ".join(files) or "chart")
        return self.git("rev-parse", "HEAD")


@dataclass(frozen=True, slots=True)
class Application:
    """One Application as a test looks at it."""

    cluster: Cluster
    namespace: str
    name: str
    compared: Callable[[str], list[Body]]

    @property
    def path(self) -> str:
        return f"/apis/{API}/namespaces/{self.namespace}/applications/{self.name}"

    def read(self) -> Body:
        return self.cluster.call("GET", self.path)

    @property
    def status(self) -> Body:
        found: Body = self.read().get("status") or {}
        return found

    def patch(self, **changes: Any) -> None:
        self.cluster.call("PATCH", self.path, changes, "application/merge-patch+json")

    def refresh(self) -> None:
        """Read git and the cluster again, as a webhook of the git server asks for, and wait until that is done."""
        self.patch(metadata={"annotations": {"argocd.argoproj.io/refresh": "hard"}})
        wait(
            f"{self.name} is refreshed",
            lambda: "argocd.argoproj.io/refresh" not in (self.read()["metadata"].get("annotations") or {}),
            within=SYNCED_WITHIN,
        )

    def until(self, revision: str, health: str, sync: str = "Synced", within: float = SYNCED_WITHIN) -> Body:
        """Wait until that revision is compared with the cluster and both are as told."""

        def look() -> Body:
            status = self.status
            compared, rated = status.get("sync") or {}, status.get("health") or {}
            operation = (status.get("operationState") or {}).get("phase")
            found = (compared.get("revision"), compared.get("status"), rated.get("status"))
            done = found == (revision, sync, health) and operation != "Running"
            return status if done else {}

        return wait(f"{self.name} is {sync} and {health} at {revision[:7]}", look, within=within, explain=self.explain)

    def explain(self) -> str:
        """Say what Argo CD found: its verdicts, and each field of which it expects another value than there is."""
        status = self.status
        shown = {key: status.get(key) for key in ("sync", "health", "conditions", "operationState", "resources")}
        differences = {one["name"]: _differences(*_states(one)) for one in self.compared(self.name)}
        return json.dumps({**shown, "differences": differences}, indent=1)

    def health_of(self, kind: str, name: str) -> str:
        """What Argo CD says of one resource."""
        listed = self.status.get("resources") or ()
        found = next(one for one in listed if (one["kind"], one["name"]) == (kind, name))
        health: str = found["health"]["status"]
        return health

    def syncs(self) -> int:
        """How many revisions were synced so far; what self-heal puts back is not counted."""
        return len(self.status.get("history") or ())

    def assert_unhealed(self) -> None:
        """Let it compare three times: it is Synced each time, and self-heal finds nothing to put back."""
        last = self.status["operationState"]
        for _ in range(3):
            self.refresh()
            status = self.status
            assert status["sync"]["status"] == "Synced", self.explain()
            assert status["operationState"] == last, self.explain()

    def roll_back(self, revision: str) -> None:
        """As the button does: sync once with a revision of the history. Automated syncs must be off."""
        old = next(one for one in self.status["history"] if one["revision"] == revision)
        strategy: Body = {"apply": {}}
        sync = {"revision": revision, "source": old["source"], "prune": True, "syncStrategy": strategy}
        options = self.read()["spec"]["syncPolicy"]["syncOptions"]
        self.patch(operation={"initiatedBy": {"username": "tests"}, "sync": {**sync, "syncOptions": options}})

    def delete(self, within: float = 90) -> None:
        """Delete it with everything that it made."""
        self.patch(metadata={"finalizers": [FINALIZER]})
        self.cluster.call("DELETE", self.path)
        wait(f"{self.name} is gone", self._is_gone, within=within, explain=self.explain)

    def _is_gone(self) -> bool:
        listed = self.cluster.call("GET", self.path.rsplit("/", 1)[0])["items"]
        return all(one["metadata"]["name"] != self.name for one in listed)


@dataclass
class ArgoCD:
    """A running Argo CD and the repository that it reads."""

    cluster: Cluster
    namespace: str
    folder: Path
    repository: Repository
    _redis: int = field(default_factory=free_port)
    _processes: ExitStack = field(default_factory=ExitStack)

    def apply(self, example: str, **changes: Any) -> Application:
        """Apply an Application of the examples with changes to its spec (dotted names: `source__path`)."""
        body = yaml.safe_load((EXAMPLES / example).read_text())
        body["metadata"]["namespace"] = self.namespace
        body["spec"]["source"]["repoURL"] = self.repository.url
        for name, value in changes.items():
            *outer, last = name.split("__")
            place = body["spec"]
            for key in outer:
                place = place[key]
            place[last] = value
        found = Application(self.cluster, self.namespace, body["metadata"]["name"], self.compared)
        self.cluster.call("POST", found.path.rsplit("/", 1)[0], body)
        return found

    def compared(self, application: str) -> list[Body]:
        """Answer what the controller compared last, resource by resource, as the user interface reads it from Redis."""
        script = "return redis.call('GET', redis.call('KEYS', ARGV[1])[1] or '')"
        command = ["redis-cli", "-p", str(self._redis), "--raw", "EVAL", script, "0"]
        named = f"app|managed-resources|{application}|*"
        done = subprocess.run([*command, named], check=True, capture_output=True)
        packed = done.stdout.removesuffix(b"\n")
        found: list[Body] = json.loads(gzip.decompress(packed)) if packed else []
        return found

    def start(self) -> None:
        redis, repo = self._redis, free_port()
        self._run("redis", "redis-server", "--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--dir", ".")
        common = ("--redis", f"127.0.0.1:{redis}", "--loglevel", "info", "--logformat", "text")
        address = ("--address", "127.0.0.1", "--port", str(repo), "--metrics-address", "127.0.0.1")
        server = str(PROGRAMS / "argocd-repo-server")
        self._run("repo-server", server, *address, "--metrics-port", str(free_port()), "--disable-tls", *common)
        reached = ("--repo-server", f"127.0.0.1:{repo}", "--repo-server-plaintext", "--metrics-port", str(free_port()))
        controller = str(PROGRAMS / "argocd-application-controller")
        named = ("--namespace", self.namespace, "--persist-resource-health")
        self._run("application-controller", controller, *reached, *named, *common)

    def _run(self, name: str, *command: str) -> None:
        """Run a component until `stop`; it ends with this process, however that ends."""
        folders = {key: str(self.folder / key.lower()) for key in ("TMPDIR", "HOME")}
        for folder in folders.values():
            Path(folder).mkdir(exist_ok=True)
        environment = {
            **os.environ,
            **folders,
            "PATH": f"{tool('helm').parent}:{PROGRAMS}:{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig()),
            "ARGOCD_FAKE_IN_CLUSTER": "true",
            "ARGOCD_GPG_ENABLED": "false",
            **{f"ARGOCD_{kind}_DATA_PATH": str(self.folder) for kind in ("TLS", "SSH", "GPG")},
        }
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],
                env=environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.callback(_end, process)

    def stop(self) -> None:
        self._processes.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def argocd(cluster: Cluster, namespace: str, folder: Path) -> Iterator[ArgoCD]:
    """Run Argo CD in that namespace, as the page docs/argocd.md configures it, with the chart in its repository."""
    repository = Repository(folder / "repository")
    repository.folder.mkdir()
    repository.git("init", "--quiet", "--initial-branch=main")
    shutil.copytree(ROOT / "charts", repository.folder / "charts")
    found = ArgoCD(cluster, namespace, folder, repository)
    definitions = [yaml.safe_load((PROGRAMS / "crds" / f"{kind[:-1]}-crd.yaml").read_text()) for kind in KINDS]
    for definition in definitions:
        cluster.apply(definition)
    try:
        _configure(cluster, namespace)
        found.start()
        yield found
    finally:
        found.stop()
        _forget(cluster, namespace)
        for definition in definitions:
            cluster.delete("CustomResourceDefinition", "", definition["metadata"]["name"])


def _configure(cluster: Cluster, namespace: str) -> None:
    labels = {"app.kubernetes.io/part-of": "argocd"}
    health = yaml.safe_load((EXAMPLES / "argocd-cm.yaml").read_text())["data"]
    for kind, name, data in (
        ("ConfigMap", "argocd-cm", {"data": health}),
        ("Secret", "argocd-secret", {"stringData": {"server.secretkey": "tests"}}),
    ):
        meta = {"name": name, "namespace": namespace, "labels": labels}
        cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": meta, **data})
    anything = [{"group": "*", "kind": "*"}]
    allowed = {"sourceRepos": ["*"], "destinations": [{"server": "*", "namespace": "*"}]}
    project = {
        "apiVersion": API,
        "kind": "AppProject",
        "metadata": {"name": "default", "namespace": namespace},
        "spec": {**allowed, "clusterResourceWhitelist": anything},
    }
    path = f"/apis/{API}/namespaces/{namespace}/appprojects"

    def made() -> bool:
        """The API server serves a new kind a moment after it is established."""
        try:
            cluster.call("POST", path, project)
        except Exception:  # noqa: BLE001
            return False
        return True

    wait("Argo CD's kinds are served", made, within=30)


def _forget(cluster: Cluster, namespace: str) -> None:
    """Take Applications' finalizers away, which nothing answers any more: else their kind cannot be deleted."""
    path = f"/apis/{API}/namespaces/{namespace}/applications"
    for body in cluster.call("GET", path)["items"]:
        clear = {"metadata": {"finalizers": None}}
        cluster.call("PATCH", f"{path}/{body['metadata']['name']}", clear, "application/merge-patch+json")


def _states(compared: Body) -> list[Any]:
    return [json.loads(compared.get(key) or "null") for key in ("normalizedLiveState", "predictedLiveState")]


def _differences(live: Any, expected: Any) -> Any:
    """Answer the fields that differ, each with both values; nothing where all are the same."""
    if not (isinstance(live, dict) and isinstance(expected, dict)):
        return None if live == expected else {"live": live, "expected": expected}
    inner = {key: _differences(live.get(key), expected.get(key)) for key in sorted({*live, *expected})}
    return {key: found for key, found in inner.items() if found} or None


def read_kstatus(objects: list[Body]) -> list[str]:
    """What Helm 4 and Flux read from objects: InProgress, Current, Failed or Terminating."""
    text = "\n".join(json.dumps(body) for body in objects)
    done = subprocess.run([PROGRAMS / "kstatus"], input=text, capture_output=True, text=True, check=True)
    return [json.loads(line)["status"] for line in done.stdout.splitlines()]


def wait_with_kubectl(namespace: str, name: str, condition: str, within: int) -> float:
    """Run `kubectl wait` on a processor, and say how many seconds it waited."""
    started = time.monotonic()
    command = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig()), "--namespace", namespace, "wait"]
    asked = [f"--for=condition={condition}", f"--timeout={within}s", f"outboxprocessor/{name}"]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - started
