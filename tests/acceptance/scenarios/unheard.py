"""Pods that run and do not answer the operator: what was met is said, with what to do; nothing is scaled down."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.scenarios import Scenarios, until_handled
from tests.support.kubernetes.cluster import REGISTRY, wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource

scenarios = Scenarios()

NODE = "10.88.0.1"
"""The local cluster's node, where probes come from (tests/tools/cluster/network.sh)."""
NETWORKS = Path(os.environ.get("OUTBOX_RUN") or "/run/outbox-operator") / "containerd"
GATE = 9999
WAITING = {
    "name": "gate",
    "image": f"{REGISTRY}/outbox-worker:dev",
    "imagePullPolicy": "IfNotPresent",
    "command": ["python", "-c", f"import socket; socket.create_server(('', {GATE})).accept()"],
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
"""Keeps a pod from starting its worker until somebody knocks."""


@scenarios.add
def a_pod_behind_a_network_policy_is_named_with_its_port_and_handles_on(rooms: Rooms) -> None:
    if os.environ.get("KUBECONFIG") or os.environ.get("OUTBOX_TEST_OPERATOR") == "process":
        pytest.skip("the firewall of a pod is set from the local cluster's node, for an operator that is a pod")
    with rooms.room() as room:
        orders = room.processor("orders", worker={"podTemplate": {"spec": {"initContainers": [WAITING]}}})
        address = orders.until("its pod has an address", lambda: address_of(orders))
        with kept_out(address):
            wait("the gate opens", lambda: knock(address), within=30)
            orders.until("the kubelet finds it ready", lambda: is_ready(orders))
            said = orders.until_condition("Ready", "Unknown", "WorkerUnreachable", within=60)
            (pod,) = orders.pods()
            assert f"pod {pod['metadata']['name']} runs" in said["message"]
            assert f"at {address}:8080: no connection is made in time" in said["message"]
            assert f"allow ingress to TCP port 8080 of the pods of namespace {room.namespace} from" in said["message"]
            assert orders.condition("WorkersAvailable")["reason"] == "WorkerUnreachable"
            orders.until_event("WorkerUnreachable")
            # It is not heard, and it works.
            room.shop.produce(3)
            until_handled(room, orders, 3)
            assert orders.status["readyReplicas"] == 1
        orders.until_ready(within=30)
        assert orders.condition("WorkersAvailable")["status"] == "True"


def address_of(orders: Resource) -> str:
    return next((pod["status"]["podIP"] for pod in orders.pods() if pod["status"].get("podIP")), "")


def is_ready(orders: Resource) -> bool:
    conditions = [each for pod in orders.pods() for each in pod["status"].get("conditions") or ()]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def knock(address: str) -> bool:
    with socket.socket() as connection:
        connection.settimeout(1)
        return connection.connect_ex((address, GATE)) == 0


@contextmanager
def kept_out(address: str) -> Iterator[None]:
    """Drop what comes to a pod's status server from other pods, inside the pod's own network.

    This is what a NetworkPolicy without an exception for the operator does: the node, and with it the kubelet's probes,
    is let in. The local cluster's network plugin is a bridge, which carries out no NetworkPolicy.
    """
    network = next(path for path in NETWORKS.glob("*/netns/*") if f" {address}/" in addresses_in(path))
    rule = ("INPUT", "-p", "tcp", "--dport", "8080", "!", "-s", NODE, "-j", "DROP")
    run_in(network, "iptables", "-w", "-A", *rule)
    try:
        yield
    finally:
        run_in(network, "iptables", "-w", "-D", *rule)


def addresses_in(network: Path) -> str:
    try:
        return run_in(network, "ip", "-4", "-o", "addr")
    except subprocess.CalledProcessError:  # The network of another scenario's pod: it ended meanwhile.
        return ""


def run_in(network: Path, *command: str) -> str:
    inside = ["nsenter", f"--net={network}", *command]
    return subprocess.run(inside, check=True, capture_output=True, text=True).stdout


@scenarios.add_at_night
def a_pod_with_another_key_is_named_until_key_and_pod_are_made_again(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        # A kubelet remembers an immutable Secret while any pod has it mounted, also one that has ended.
        orders.spec(suspend=True)
        orders.until_no_pods()
        labels = "outbox-operator.dev/processor=orders,outbox-operator.dev/role=worker"
        orders.until("its pod is gone", lambda: not room.cluster.items("Pod", room.namespace, labels), within=60)
        (secret,) = room.cluster.items("Secret", room.namespace, "outbox-operator.dev/processor=orders")
        meta = {key: secret["metadata"][key] for key in ("name", "namespace", "labels")}
        room.cluster.delete("Secret", room.namespace, meta["name"])
        other = base64.b64encode(b"0" * 64).decode()
        room.cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {"key": other}})
        orders.spec(suspend=False)
        said = orders.until_condition("Ready", "Unknown", "WorkerUnreachable", within=90)
        assert "it has another key than this operator (it answers 401)" in said["message"]
        assert f"delete Secret {meta['name']} and this pod" in said["message"]
        orders.until_event("WorkerUnreachable")
        assert is_ready(orders)
        assert room.cluster.need("Deployment", room.namespace, "orders-worker")["spec"]["replicas"] == 1
        # What the condition advises.
        room.cluster.delete("Secret", room.namespace, meta["name"])
        (pod,) = orders.pods()
        room.cluster.delete("Pod", room.namespace, pod["metadata"]["name"])
        orders.until_ready(within=180)
