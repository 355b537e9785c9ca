"""The Spark driver is killed between the database's commit and Spark's own log: the batch is replayed, and told 0.

The moment is made, not hoped for: the driver's Python is held in its transaction, its Java process is frozen there, and
Python is let go. It commits; Java cannot write `commits/N`; then both are killed.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from tests.tools.demo.place import ANALYTICS
from tests.tools.demo.processes import find_process, send
from tests.tools.demo.scene import Scene
from tests.tools.demo.spark import TABLE, find_driver, kill_driver_processes, newest_batch
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from tests.tools.demo.database import Pair
    from tests.tools.demo.scene import Demo

COMMITS_WITHIN: Final = 10.0
REPLAYS_WITHIN: Final = 90.0


def run(demo: Demo) -> None:
    """Make the moment, kill, and see the replay skipped."""
    scene = Scene(demo, "replayed Spark batch", ANALYTICS)
    if not demo.place.local:
        scene.note("left out: on a cluster of your own the demo cannot freeze a container's process from outside")
        return
    before = scene.count_answers(0)
    pod = find_driver(demo)
    python, java = find_process(pod, "outbox_spark"), find_process(pod, "java")
    with demo.database.hold_next_batch(TABLE):
        send(java, signal.SIGSTOP)
        held = stored(scene)
    scene.did(f"froze the driver's Java process {java} while its Python process {python} was in its transaction")
    scene.expect("the batch is committed in the database", lambda: stored(scene) > held, within=COMMITS_WITHIN)
    committed = stored(scene)
    batch, over = newest_batch(python)
    scene.require(f"Spark's own log has no commits/{batch}", not over)
    pids = kill_driver_processes(pod)
    scene.did(f"kill -KILL {' '.join(map(str, pids))}, between the commit and Spark's own log")
    scene.expect(
        f"batch {batch} is replayed, told 0 and skipped", lambda: scene.count_answers(0) > before, within=REPLAYS_WITHIN
    )
    scene.told("0, ignored: the stored pair is the new one already")
    scene.expect("the next batches are handled", lambda: stored(scene) > committed, within=REPLAYS_WITHIN)
    scene.require("CheckpointHealthy is not false", not scene.resource().is_condition("CheckpointHealthy", "False"))


def stored(scene: Scene) -> Pair:
    """Return the stored pair.

    Raises:
        DemoError: there is none.

    """
    pair = scene.demo.database.checkpoint(ANALYTICS)
    if pair is None:
        raise DemoError(f"{ANALYTICS} has no checkpoint")
    return pair
