"""Step 7: SIGKILL in the middle of a batch; the processor resumes from its checkpoint."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString

from tests.tools.demo.intruders.frozen_replica import find_pod, live_lease
from tests.tools.demo.place import ANALYTICS, NAMESPACE, PROJECTION, RABBITMQ
from tests.tools.demo.processes import find_process, send
from tests.tools.demo.scene import Scene
from tests.tools.demo.spark import TABLE, find_driver, kill_driver_processes
from tests.tools.demo.waiting import DemoError, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tools.demo.database import Database, Pair
    from tests.tools.demo.scene import Demo

RESUMES_WITHIN: Final = 15.0 + 20.0
"""The default lease, and time for the takeover and the first batch."""
DRIVER_RESUMES_WITHIN: Final = 90.0
LOCK_ROW: Final[LiteralString] = """
SELECT 1 FROM outbox.processor_checkpoints WHERE processor_id = %s AND partition = 0 FOR UPDATE
"""
BLOCKED: Final[LiteralString] = "SELECT pid FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"


@dataclass(frozen=True, slots=True)
class KilledBatch:
    """A batch that a killed worker had published and could not check in.

    Attributes:
        pod: who was killed.
        epoch: of its lease; its first copies carry both.
        after: the pair stored before the batch.

    """

    pod: str
    epoch: int
    after: Pair


def kill_projection(demo: Demo) -> None:
    """Kill the owner of a Transactional processor in the middle of its statement."""
    scene = Scene(demo, "killed worker", PROJECTION)
    with demo.database.hold_next_batch("projection.handled_orders"):
        pod = kill_owner(scene)
        before = demo.database.checkpoint(PROJECTION)
    resumes(scene, before, pod)


def kill_publisher(demo: Demo) -> KilledBatch:
    """Kill the publisher when the broker has confirmed its batch and the checkpoint is not stored yet."""
    scene = Scene(demo, "killed publisher", RABBITMQ)
    with hold_checkpoint_row(demo.database, RABBITMQ) as pair:
        epoch = live_lease(scene).epoch
        pod = kill_owner(scene)
    resumes(scene, pair, pod)
    return KilledBatch(pod, epoch, pair)


def kill_driver(demo: Demo) -> None:
    """Kill the Spark driver in the middle of its transaction."""
    scene = Scene(demo, "killed Spark driver", ANALYTICS)
    with demo.database.hold_next_batch(TABLE):
        before = demo.database.checkpoint(ANALYTICS)
        pod = find_driver(demo)
        name = pod["metadata"]["name"]
        if demo.place.local:
            pids = kill_driver_processes(pod)
            scene.did(f"kill -KILL {' '.join(map(str, pids))}, driver {name} in the middle of a batch")
        else:
            delete_pod(scene, name)
    resumes(scene, before, name, within=DRIVER_RESUMES_WITHIN)


def kill_owner(scene: Scene) -> str:
    """Kill the worker that owns the processor."""
    owner = live_lease(scene).pod
    kill_worker(scene, owner, "in the middle of a batch")
    return owner


def kill_worker(scene: Scene, pod: str, when: str) -> None:
    """SIGKILL a pod's worker, or take the whole pod where the node is elsewhere."""
    if scene.demo.place.local:
        pid = find_process(find_pod(scene.demo, pod), "outbox_worker")
        send(pid, signal.SIGKILL)
        scene.did(f"kill -KILL {pid}, the worker of {pod}, {when}")
    else:
        delete_pod(scene, pod)


def delete_pod(scene: Scene, name: str) -> None:
    """Take a pod away without asking it."""
    scene.demo.cluster.kubectl("delete", "pod", name, "-n", NAMESPACE, "--force", "--grace-period=0", "--wait=false")
    scene.did(f"kubectl delete pod {name} --force --grace-period=0, in the middle of a batch")


def resumes(scene: Scene, before: Pair | None, pod: str, *, within: float = RESUMES_WITHIN) -> None:
    """See the checkpoint move on."""
    scene.expect(
        f"it resumes after {format_pair(before)}",
        lambda: (scene.demo.database.checkpoint(scene.name) or (0, 0)) > (before or (0, 0)),
        within=within,
    )
    lease = scene.demo.database.lease(scene.name)
    scene.note(f"shows: {pod} had it, {lease.pod if lease else 'nobody'} has it now")


@contextmanager
def hold_checkpoint_row(database: Database, processor: str) -> Iterator[Pair]:
    """Lock the checkpoint row and wait until the owner stands before it; yield the stored pair.

    Raises:
        DemoError: nobody came, or there is no row.

    """
    with database.connect("demo-row-lock") as connection:
        connection.execute("BEGIN")
        if connection.execute(LOCK_ROW, [processor]).fetchone() is None:
            raise DemoError(f"{processor} has no checkpoint")
        mine = connection.info.backend_pid
        wait_for(f"{processor} stands before its checkpoint", lambda: database.one(BLOCKED, mine), within=20)
        pair = database.checkpoint(processor)
        if pair is None:
            raise DemoError(f"{processor} has no checkpoint")
        yield pair
        connection.execute("ROLLBACK")


def format_pair(pair: tuple[Any, ...] | None) -> str:
    """Write a pair as status does."""
    return f"{pair[0]}:{pair[1]}" if pair else "nothing"
