"""Two more readers of the same messages, in modes that share the work among pods: what each of them is for.

Mode Competing: a consumer dies in the middle of its batch, and another one takes what it had. Mode Partitioned with the
cursor Snapshot: a transaction that is open in another database of the server holds nothing up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, LiteralString

from tests.tools.demo.place import PARCELS, SEARCH
from tests.tools.demo.scene import Scene
from tests.tools.demo.scenes.kills import kill_worker
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from tests.tools.demo.scene import Demo

TAKEN_WITHIN: Final = 5.0 + 5.0
"""The lease of the example, and time for another consumer."""
CAUGHT_UP_WITHIN: Final = 45.0
BATCH: Final[LiteralString] = """
SELECT owner, attempt, messages FROM outbox.competing_batches WHERE processor_id = %s AND pod = %s AND owner IS NOT NULL
"""
IN_HAND: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM outbox.competing_batches WHERE processor_id = %s AND owner = %s)
"""
HANDLED_ABOVE: Final[LiteralString] = """
SELECT count(*) FROM outbox.messages m JOIN search.handled_orders h USING (message_id)
 WHERE m.transaction_id > %s::text::xid8
"""


def lose_consumer(demo: Demo) -> None:
    """Kill a consumer in the middle of its batch; see that nobody waits longer than its lease."""
    scene = Scene(demo, "killed consumer", PARCELS)
    scene.expect("both consumers work", lambda: scene.resource().owner_pod == "2 pods", within=CAUGHT_UP_WITHIN)
    with demo.database.hold_next_batch("parcels.handled_orders") as backend:
        pod = demo.database.application_of(backend).split(" ")[-1]
        batch = demo.database.one(BATCH, PARCELS, pod)
        if batch is None:
            raise DemoError(f"{pod} handles a batch that nobody handed out")
        kill_worker(scene, pod, f"with {batch[2]} messages in hand")
    scene.expect(
        "what it had in hand is another's", lambda: demo.database.one(IN_HAND, PARCELS, batch[0]) == (False,),
        within=TAKEN_WITHIN,
    )  # fmt: skip


def open_elsewhere(demo: Demo) -> None:
    """Open a transaction in another database; see messages handled that were stored after it began to write."""
    scene = Scene(demo, "open transaction elsewhere", SEARCH)
    with demo.database.elsewhere("postgres").connect("nightly-report") as stranger, stranger.transaction():
        row = stranger.execute("SELECT pg_current_xact_id()::text").fetchone()
        xid = row[0] if row else "0"
        scene.did(f"opens transaction {xid} in another database of the server, and leaves it open")
        handled = scene.expect(
            "messages of later transactions are handled meanwhile",
            lambda: count_above(demo, xid) or None,
            within=CAUGHT_UP_WITHIN,
        )
        scene.note(f"shows: {handled} of them; with the cursor TransactionOrder they would wait for it")
        scene.require("SourceCurrent is not false", not scene.resource().is_condition("SourceCurrent", "False"))
    shares: dict[str, list[str]] = {}
    for each in scene.resource().status.get("partitions") or []:
        shares.setdefault(each.get("pod", "nobody"), []).append(str(each["partition"]))
    scene.note("says:  " + "; ".join(f"{pod} has partitions {', '.join(own)}" for pod, own in shares.items()))


def count_above(demo: Demo, xid: str) -> int:
    """Count handled messages of later transactions."""
    row = demo.database.one(HANDLED_ABOVE, xid)
    return int(row[0]) if row else 0
