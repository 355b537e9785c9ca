"""A script without ownership calls the article's four-argument form: 4, rolled back, counted, and visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.demo.place import PROJECTION
from tests.tools.demo.scene import Scene
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from tests.tools.demo.scene import Demo

CALL = "SELECT outbox.store_processor_checkpoint(%s, %s, %s, pg_current_xact_id())"


def run(demo: Demo) -> None:
    """Write something, call, be refused, roll back; then look for the count."""
    scene = Scene(demo, "script without ownership", PROJECTION)
    before = scene.resource().conflicts.get("unownedCalls", 0)
    checkpoint = demo.database.checkpoint(PROJECTION)
    if checkpoint is None:
        raise DemoError("script without ownership: there is no checkpoint to aim at")
    scene.did("writes a row and calls store_processor_checkpoint(text, bigint, bigint, xid8), as the article has it")
    with demo.database.connect("somebodys-script") as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO demo.script_effects VALUES ('handled by a script')")
        row = connection.execute(CALL, [PROJECTION, checkpoint[1] + 100, checkpoint[1]]).fetchone()
        connection.execute("ROLLBACK")
    scene.told(str(row[0] if row else None))
    scene.require("the answer is 4, not the owner", row == (4,))
    effects = demo.database.one("SELECT count(*) FROM demo.script_effects")
    scene.require("its transaction is rolled back", effects == (0,))
    counted = scene.expect(
        f"status.conflicts.unownedCalls is above {before}",
        lambda: (
            scene.resource().conflicts.get("unownedCalls", 0) > before and scene.resource().conflicts["unownedCalls"]
        ),
    )
    scene.note(f"says:  status.conflicts.unownedCalls={counted}")
    scene.expect_event("without ownership")
