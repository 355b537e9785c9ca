"""The active replica is frozen with SIGSTOP in the middle of a batch, past its lease, and thawed later.

Its standby takes over meanwhile. When it thaws, its batch is refused with 4 and rolled back; it becomes the standby.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

from tests.tools.demo.place import LOYALTY, NAMESPACE
from tests.tools.demo.processes import find_process, send
from tests.tools.demo.scene import Scene
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from tests.tools.demo.database import Lease
    from tests.tools.demo.scene import Demo

TABLE: Final = "loyalty.handled_orders"
TAKEOVER_WITHIN: Final = 15.0 + 10.0
"""The default lease, and time to notice."""
BACK_WITHIN: Final = 20.0


def run(demo: Demo) -> None:
    """Freeze, watch the takeover, thaw, watch the refusal."""
    scene = Scene(demo, "frozen replica", LOYALTY)
    if not demo.place.local:
        scene.note("left out: on a cluster of your own the demo cannot stop a container's PID 1 from outside")
        return
    before = scene.count_answers(4)
    with demo.database.hold_next_batch(TABLE):
        old = live_lease(scene)
        pod = find_pod(demo, old.pod)
        pid = find_process(pod, "outbox_worker")
        send(pid, signal.SIGSTOP)
        scene.did(f"kill -STOP {pid}, the worker of {old.pod} (epoch {old.epoch}), in the middle of a batch")
        try:
            new = scene.expect(
                "its standby took the lease over", lambda: taken_over(scene, old), within=TAKEOVER_WITHIN
            )
            scene.note(f"shows: {new.pod} has epoch {new.epoch}")
            scene.mark()
            handled = handled_rows(scene)
            scene.expect("the new owner handles messages", lambda: handled_rows(scene) > handled, within=BACK_WITHIN)
            scene.expect("status.owner is the new owner", lambda: scene.resource().owner_pod == new.pod)
        finally:
            send(pid, signal.SIGCONT)
        scene.did(f"kill -CONT {pid}: the frozen worker wakes in its batch")
    scene.expect("one more refusal with code 4 in status.conflicts", lambda: scene.count_answers(4) > before)
    last = scene.resource().conflicts["last"]
    scene.told_answer(last)
    scene.require("the refused pod is the frozen one", (last["code"], last["pod"]) == (4, old.pod))
    scene.expect_event("OwnershipMoved", old.pod, new.pod)
    said = scene.expect("the frozen worker is the standby now", lambda: standby(demo, old.pod), within=BACK_WITHIN)
    scene.note(f"says:  {old.pod}: {said}")
    scene.require("CheckpointHealthy stays true", not scene.resource().is_condition("CheckpointHealthy", "False"))
    after = find_pod(demo, old.pod)
    scene.require("its container was not restarted", restarts(after) == restarts(pod))


def live_lease(scene: Scene) -> Lease:
    """Return the owner.

    Raises:
        DemoError: there is none.

    """
    lease = scene.demo.database.lease(scene.name)
    if lease is None or not lease.live:
        raise DemoError(f"{scene.title}: {scene.name} has no owner")
    return lease


def taken_over(scene: Scene, old: Lease) -> Lease | None:
    """Return the lease when another pod has it."""
    lease = scene.demo.database.lease(scene.name)
    return lease if lease and lease.live and lease.epoch > old.epoch and lease.pod != old.pod else None


def find_pod(demo: Demo, name: str) -> dict[str, Any]:
    """Read a pod.

    Raises:
        DemoError: it is not there.

    """
    pod = demo.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
    if pod is None:
        raise DemoError(f"pod {name} is gone")
    return pod


def standby(demo: Demo, pod: str) -> str | None:
    """Return what the worker says of its readiness, to which everybody may listen, when it is Standby."""
    address = find_pod(demo, pod)["status"].get("podIP")
    try:
        with urlopen(f"http://{address}:8080/readyz", timeout=5) as answer:
            said: str = answer.read().decode().strip()
    except OSError:
        return None
    return said if said.startswith("Standby:") else None


def restarts(pod: dict[str, Any]) -> int:
    """Count the restarts of a pod's containers."""
    return sum(container["restartCount"] for container in pod["status"].get("containerStatuses", []))


def handled_rows(scene: Scene) -> int:
    """Return the number of the last row that the handler wrote."""
    row = scene.demo.database.one("SELECT coalesce(max(handled_id), 0) FROM loyalty.handled_orders")
    return int(row[0]) if row else 0
