"""`kubectl outbox` against the real cluster: what it asks for, the operator and its workers carry out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import yaml

from tests.acceptance.scenarios import Scenarios, block, until_handled
from tests.chart.chart import tool
from tests.support.kubernetes.cluster import kubeconfig, namespaces
from tests.support.kubernetes.room import BY_PAIRS, Room
from tests.support.servers.proxy import Relay

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.acceptance.scenarios import Running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

PROGRAM = Path(sys.executable).with_name("kubectl-outbox")
scenarios = Scenarios()


def outbox(room: Room, *arguments: str, status: int = 0, both: bool = False) -> str:
    """Run `kubectl-outbox` in the room's namespace; return stdout, with stderr when it should fail, or with `both`."""
    command = [str(PROGRAM), *arguments, "--kubeconfig", str(kubeconfig()), "-n", room.namespace]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, stdin=subprocess.DEVNULL)
    assert done.returncode == status, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout if status == 0 and not both else done.stdout + done.stderr


@scenarios.add
def status_shows_what_the_resource_says(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        until_handled(room, orders, 3)
        stored = orders.until("the checkpoint", lambda: orders.status.get("checkpoint", {}).get("pair", ""))
        (record,) = json.loads(outbox(room, "status", "-o", "json"))
        assert (record["name"], record["phase"], record["ready"]) == ("orders", "Running", "Running")
        assert record["owner"] == orders.status["owner"]["pod"]
        assert record["checkpoint"]
        assert stored
        assert "Ready=True Running" in outbox(room, "status", "orders")
        assert "not found" in outbox(room, "status", "nothing", status=3)


@scenarios.add
def a_namespace_that_no_operator_serves_is_told(rooms: Rooms) -> None:
    """The operator has no right there and cannot say it: the command looks at what the operators' Deployments say."""
    source = {"connection": {"secretRef": {"name": "db"}}}
    with rooms.room() as room, namespaces(rooms.cluster, "unserved") as (unserved,):
        served = room.processor("orders")
        served.until_ready()
        body = served.read()
        body["metadata"] = {"name": "orders", "namespace": unserved}
        rooms.cluster.create({"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": body["metadata"],
                              "spec": {"source": source, "target": {"log": {}}}})  # fmt: skip
        elsewhere = Room(rooms.cluster, room.server, unserved, room.shop)
        listed = outbox(elsewhere, "status", both=True)
        assert f"no operator serves namespace {unserved}: its resources get no status" in listed
        assert "NotServed" in listed
        assert f"--set 'watchNamespaces={{{room.namespace}" in listed or "watchNamespaces={" in listed
        assert json.loads(outbox(elsewhere, "status", "orders", "-o", "json"))["servedBy"] == []
        waited = outbox(elsewhere, "resume", "orders", "--wait", "--timeout", "3", status=1)
        assert "no operator serves namespace" in waited
        assert "no operator serves" not in outbox(room, "status", both=True)


@scenarios.add
def pause_waits_until_nothing_runs_and_resume_until_it_does(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        outbox(room, "pause", "orders", "--wait")
        assert orders.pods() == []
        assert json.loads(outbox(room, "status", "orders", "-o", "json"))["suspended"] is True
        room.shop.produce(3)
        outbox(room, "resume", "orders", "--wait")
        until_handled(room, orders, 3)


@scenarios.add
def waiting_goes_on_while_the_api_server_is_away_and_ends_when_the_resource_goes(rooms: Rooms) -> None:
    """Both wait for a Secret that is not there, one of them through a connection that breaks."""
    source = {"connection": {"secretRef": {"name": "later"}}}
    with rooms.room() as room, tempfile.TemporaryDirectory() as directory:
        known = yaml.safe_load(kubeconfig().read_text())
        server = urlsplit(known["clusters"][0]["cluster"]["server"])
        relay = Relay(server.port or 443)
        known["clusters"][0]["cluster"]["server"] = f"https://{server.hostname}:{relay.port}"
        through = Path(directory) / "kubeconfig"
        through.touch(mode=0o600)
        through.write_text(yaml.safe_dump(known))
        try:
            going = room.processor("going", source=source, processorId="going", suspend=True)
            staying = room.processor("staying", source=source, processorId="staying", suspend=True)
            waiting = [_resume(room, going.name, kubeconfig()), _resume(room, staying.name, through)]
            going.until("it is asked", lambda: not going.read()["spec"]["suspend"])
            staying.until("it is asked", lambda: not staying.read()["spec"]["suspend"])
            time.sleep(2)  # The answer to that request is on its way: only what follows is waiting.
            relay.cut()
            going.delete()
            _, said = waiting[0].communicate(timeout=60)
            assert (waiting[0].returncode, "going was asked, and went before" in said) == (1, True), said
            time.sleep(3)
            assert waiting[1].poll() is None, waiting[1].communicate()
            relay.heal()
            room.secret("later")
            _, said = waiting[1].communicate(timeout=120)
            assert waiting[1].returncode == 0, said
        finally:
            relay.close()


def _resume(room: Room, name: str, config: Path) -> subprocess.Popen[str]:
    command = [str(PROGRAM), "resume", name, "--wait", "--timeout", "120", "--kubeconfig", str(config)]
    return subprocess.Popen(
        [*command, "-n", room.namespace], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@scenarios.add
def accept_decides_the_conflict_that_was_seen(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        opened = block(room, orders, 100)
        number = str(opened["id"])
        assert f"--conflict {number}" in outbox(room, "accept", "orders", "--yes", status=3)
        assert "is open, not" in outbox(room, "accept", "orders", "--yes", "--conflict", "99999", status=3)
        outbox(room, "accept", "orders", "--yes", "--conflict", number, "--wait")
        orders.until_ready()
        acts = room.shop.query("SELECT action, to_position FROM outbox.audit_log")
        assert acts == [("Accept", int(opened["stored"].partition(":")[2]))]
        assert "no conflict is open" in outbox(room, "accept", "orders", status=3)


@scenarios.add
def rewind_decides_the_conflict_the_other_way(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", source=BY_PAIRS)
        opened = block(room, orders, 100)
        arguments = ("rewind", "orders", "--to", opened["expected"], "--conflict", str(opened["id"]))
        assert opened["expected"] in outbox(room, *arguments, "--dry-run")
        assert "in a cluster only --to" in outbox(room, *arguments, "--partition", "3", "--yes", status=3)
        orders.annotate(accept_checkpoint=f"{opened['id'] + 1}=1:1")
        outbox(room, *arguments, "--yes", "--wait")
        assert "outbox-operator.dev/accept-checkpoint" not in orders.read()["metadata"].get("annotations", {})
        until_handled(room, orders, 6)
        assert len(set(room.handled())) == 6


@scenarios.add
def paused_a_checkpoint_is_rewound_in_the_database(rooms: Rooms) -> None:
    """Without a conflict: pause, rewind, resume; the messages are handled again."""
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(4)
        until_handled(room, orders, 4)
        outbox(room, "pause", "orders", "--wait")
        shop = room.shop
        variables = os.environ | {
            "PGHOST": shop.host, "PGDATABASE": shop.name, "PGUSER": shop.name, "PGPASSWORD": shop.password,
        }  # fmt: skip
        command = [str(PROGRAM.with_name("outbox")), "rewind", "orders", "--to-beginning", "--yes", "--reason", "test"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=60)
        assert done.returncode == 0, done.stderr
        outbox(room, "resume", "orders", "--wait")
        until_handled(room, orders, 8)
        assert len(set(room.handled())) == 4


@pytest.mark.parametrize("name", scenarios.names)
def test_scenario(running: Running, name: str) -> None:
    assert running.finish(name, within=540)


def test_kubectl_finds_the_plugin(rooms: Rooms) -> None:
    with rooms.room() as room:
        variables = os.environ | {"PATH": f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"}
        command = [str(tool("kubectl")), "outbox", "status", "--kubeconfig", str(kubeconfig()), "-n", room.namespace]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "there is no OutboxProcessor" in done.stderr
