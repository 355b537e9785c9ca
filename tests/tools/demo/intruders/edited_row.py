"""Somebody edits the checkpoint row: ahead, and later back. The worker is told 2, and 3; all stops.

Nothing runs until a person decides; the demo decides as one would, by annotation: accepts the first, rewinds the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, LiteralString

from tests.tools.demo.intruders.frozen_replica import handled_rows
from tests.tools.demo.place import LOYALTY, NAMESPACE
from tests.tools.demo.scene import Scene
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from tests.tools.demo.scene import Demo

TABLE: Final = "loyalty.handled_orders"
LATER_IN_TRANSACTION: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM outbox.messages WHERE transaction_id = %s::text::xid8 AND position > %s)
"""
EDIT_AHEAD: Final[LiteralString] = """
UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + 1000000
 WHERE processor_id = %s AND partition = 0 RETURNING last_processed_transaction_id::text, last_processed_position
"""
EDIT_BACK: Final[LiteralString] = """
UPDATE outbox.processor_checkpoints c
   SET (last_processed_transaction_id, last_processed_position) = (
        SELECT m.transaction_id, m.position FROM outbox.messages m
         WHERE (m.transaction_id, m.position) < (c.last_processed_transaction_id, c.last_processed_position)
         ORDER BY m.transaction_id DESC, m.position DESC OFFSET 500 LIMIT 1)
 WHERE processor_id = %s AND partition = 0 RETURNING last_processed_transaction_id::text, last_processed_position
"""
STAYS_SECONDS: Final = 4.0
RESUMES_WITHIN: Final = 30.0
BOUNDARY_SECONDS: Final = 90.0


def run(demo: Demo) -> None:
    """Edit ahead and accept; edit back and rewind."""
    scene = Scene(demo, "edited checkpoint", LOYALTY)
    expected, stored = edit(scene, EDIT_AHEAD, "a million positions ahead, inside its last transaction", at_end=True)
    conflict = blocked(scene, 2, expected, stored)
    # Nothing lies between the two pairs (see `edit`), so accepting what is stored loses nothing.
    decide(scene, "accept-checkpoint", conflict, stored)
    scene = Scene(demo, "edited checkpoint", LOYALTY)
    expected, stored = edit(scene, EDIT_BACK, "500 messages back", at_end=False)
    conflict = blocked(scene, 3, expected, stored)
    decide(scene, "rewind-checkpoint", conflict, expected)


def edit(scene: Scene, statement: LiteralString, how: str, *, at_end: bool) -> tuple[str, str]:
    """Edit the row while the worker is in the middle of a batch; return what it expects and what it will find.

    With `at_end` only where the batch before it ended with a transaction's last message. A full batch seldom does, so
    that is waited for until the processor has caught up.
    """
    database = scene.demo.database
    give_up = time.monotonic() + BOUNDARY_SECONDS
    while time.monotonic() < give_up:
        with database.hold_next_batch(TABLE):
            pair = database.checkpoint(LOYALTY)
            if pair is None or (at_end and database.one(LATER_IN_TRANSACTION, str(pair[0]), pair[1]) == (True,)):
                continue
            row = database.one(statement, LOYALTY)
            expected, stored = f"{pair[0]}:{pair[1]}", f"{row[0]}:{row[1]}" if row else ""
            scene.did(f"UPDATE outbox.processor_checkpoints {how}: {expected} becomes {stored}")
            return expected, stored
    raise DemoError(f"{scene.title}: no batch ended with a transaction in {BOUNDARY_SECONDS:.0f} s")


def blocked(scene: Scene, code: int, expected: str, stored: str) -> int:
    """See the worker told the code, everything stopped, and staying so; return the conflict's number."""

    def look() -> dict[str, object] | None:
        conflict = scene.resource().conflicts.get("open")
        return conflict if conflict and conflict["code"] == code else None

    conflict = scene.expect(f"an open conflict with code {code}", look)
    scene.told_answer(conflict)
    scene.require("both pairs are those of the edit", (conflict["expected"], conflict["stored"]) == (expected, stored))
    scene.expect_condition("CheckpointHealthy", "False", expected, stored)
    scene.expect_event(expected, stored)
    scene.expect_no_pods()
    rows = handled_rows(scene)
    deadline = time.monotonic() + STAYS_SECONDS
    while time.monotonic() < deadline:
        healthy = scene.resource().is_condition("CheckpointHealthy", "True")
        if healthy or scene.demo.cluster.pods(LOYALTY) or handled_rows(scene) != rows:
            raise DemoError(f"{scene.title}: it did not stay stopped: {scene.resource().describe('CheckpointHealthy')}")
        time.sleep(0.5)
    scene.note(f"shows: it stays so for {STAYS_SECONDS:.0f} s: no pod, no row, the row as edited")
    return int(str(conflict["id"]))


def decide(scene: Scene, verb: str, conflict: int, pair: str) -> None:
    """Decide as a person would, and see it go on."""
    annotation = f"outbox-operator.dev/{verb}={conflict}={pair}"
    scene.did(f"kubectl annotate obp {LOYALTY} {annotation}")
    scene.demo.cluster.kubectl("annotate", "obp", LOYALTY, "-n", NAMESPACE, annotation, "--overwrite")
    rows = handled_rows(scene)
    scene.expect_condition("CheckpointHealthy", "True", within=RESUMES_WITHIN)
    scene.expect("it handles messages again", lambda: handled_rows(scene) > rows, within=RESUMES_WITHIN)
