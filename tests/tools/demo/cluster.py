"""The Kubernetes cluster, as a person at a terminal and a patient reader see it.

What a person would type goes through kubectl and is shown; what the demo only watches is read through one kept API
connection, because a process for every look would cost more than what it looks at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, Final

from kubernetes import client, config

from tests.tools.demo.place import NAMESPACE
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tools.demo.place import Place

GROUP: Final = "/apis/outbox-operator.dev/v1alpha1"
NAME_LABEL: Final = "outbox-operator.dev/processor"
ROLE_LABEL: Final = "outbox-operator.dev/role"
WORK_ROLES: Final = ("worker", "driver")
"""Executors and the short-lived jobs that ask for a claim have others."""


class Cluster:
    """One cluster."""

    def __init__(self, place: Place) -> None:
        """Load the kubeconfig; connect when first asked."""
        self.place = place
        self._api: client.ApiClient = config.new_client_from_config(str(place.kubeconfig))
        self._environment = {**os.environ, "KUBECONFIG": str(place.kubeconfig)}

    def run(self, *command: str, stdin: str | None = None, check: bool = True, seconds: float = 300) -> str:
        """Run a program (kubectl, helm) against this cluster; return what it printed.

        Raises:
            DemoError: it failed, with what it said.

        """
        program = shutil.which(command[0]) or command[0]
        done = subprocess.run(
            [program, *command[1:]],
            input=stdin,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        if check and done.returncode:
            raise DemoError(f"{' '.join(command)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl."""
        return self.run("kubectl", *arguments, stdin=stdin, check=check)

    def apply(self, document: dict[str, Any]) -> None:
        """Apply one object; it goes by standard input, so a Secret is on no command line."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    def environment(self) -> dict[str, str]:
        """Return the environment in which programs find this cluster."""
        return dict(self._environment)

    def get(self, path: str) -> dict[str, Any] | None:
        """Read one object or list by its API path; None when it does not exist."""
        accept = {"Accept": "application/json"}
        request = self._api.param_serialize("GET", path, header_params=accept, auth_settings=["BearerToken"])
        answer = self._api.call_api(*request, _request_timeout=10)
        text = answer.read()
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise DemoError(f"GET {path} was answered {answer.status}: {text[:300]!r}")
        value: dict[str, Any] = json.loads(text)
        return value

    def items(self, path: str) -> list[dict[str, Any]]:
        """Read a list."""
        return list((self.get(path) or {}).get("items") or [])

    def processor(self, name: str, namespace: str = NAMESPACE) -> Processor:
        """Read one OutboxProcessor, as it is now."""
        return Processor(self.get(f"{GROUP}/namespaces/{namespace}/outboxprocessors/{name}") or {})

    def pods(self, name: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """Read the pods that handle a processor's messages, or could; those that are going away count too."""
        selector = f"labelSelector={NAME_LABEL}%3D{name}"
        pods = self.items(f"/api/v1/namespaces/{namespace}/pods?{selector}")
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get(ROLE_LABEL) in WORK_ROLES]

    def events(self, name: str, namespace: str = NAMESPACE) -> Iterator[dict[str, str]]:
        """Read the Events about one processor as reason, type and note."""
        selector = f"fieldSelector=involvedObject.kind%3DOutboxProcessor,involvedObject.name%3D{name}"
        for event in self.items(f"/api/v1/namespaces/{namespace}/events?{selector}"):
            yield {
                "reason": str(event.get("reason")),
                "type": str(event.get("type")),
                "note": str(event.get("message", "")),
                "uid": str(event["metadata"]["uid"]),
                "count": str(event.get("count") or (event.get("series") or {}).get("count") or 1),
            }


class Processor:
    """One OutboxProcessor at one moment."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Wrap the API object; an empty one stands for a resource that is not there."""
        self.document = document
        self.status: dict[str, Any] = document.get("status") or {}

    def exists(self) -> bool:
        """Whether there was such a resource."""
        return bool(self.document)

    def condition(self, kind: str) -> dict[str, Any]:
        """Return one condition, or an empty one."""
        return next((c for c in self.status.get("conditions") or [] if c["type"] == kind), {})

    def is_condition(self, kind: str, status: str) -> bool:
        """Whether the condition has the status and speaks of the current spec."""
        return self.condition(kind).get("status") == status

    def describe(self, *kinds: str) -> str:
        """Write conditions as people read them."""
        texts = []
        for kind in kinds:
            condition = self.condition(kind)
            reason, status = condition.get("reason", ""), condition.get("status", "absent")
            texts.append(f"{kind}={status} {reason}: {condition.get('message', '')}")
        return "\n".join(texts)

    @property
    def conflicts(self) -> dict[str, Any]:
        """The conflict summary in status."""
        return self.status.get("conflicts") or {}

    @property
    def owner_pod(self) -> str:
        """The pod that status names as owner."""
        return str((self.status.get("owner") or {}).get("pod", ""))

    @property
    def uid(self) -> str:
        """metadata.uid."""
        return str((self.document.get("metadata") or {}).get("uid", ""))
