"""Asks a worker's pod on the cluster as its operator does, with the key from the resource's Secret."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from outbox_operator.reconcile.reports import Question

if TYPE_CHECKING:
    from tests.support.kubernetes.cluster import Body, Cluster

PORT = 8080


def key_of(cluster: Cluster, namespace: str, name: str) -> bytes:
    """The key of a resource; a cluster's administrator may read it."""
    labels = f"outbox-operator.dev/processor={name}"
    (secret,) = cluster.items("Secret", namespace, labels)
    return base64.b64decode(secret["data"]["key"])


def call_pod(pod: Body, path: str, headers: dict[str, str], body: bytes | None = None) -> tuple[int, str]:
    """Call a pod by its address: status and text."""
    request = Request(f"http://{pod['status']['podIP']}:{PORT}{path}", data=body, headers=headers)
    try:
        with urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as err:
        with err:
            return err.code, err.read().decode()


def ask_pod(cluster: Cluster, pod: Body, path: str) -> tuple[int, str]:
    """Ask a pod a signed question."""
    meta = pod["metadata"]
    name = meta["labels"]["outbox-operator.dev/processor"]
    asked = Question("GET", path, meta["uid"], key_of(cluster, meta["namespace"], name))
    return call_pod(pod, path, asked.headers)
