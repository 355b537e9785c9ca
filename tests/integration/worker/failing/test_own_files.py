"""A worker whose own output and files cannot be written does its work, and ends as one that is well."""

from __future__ import annotations

from tests.support.worker import SQL_TARGET, build_config


def test_a_termination_message_that_cannot_be_written_fails_no_stop(database, outbox, workers):
    home = workers.prepare(build_config(database, SQL_TARGET), database.uri())
    (home / "termination-log").unlink()
    (home / "termination-log").symlink_to("/dev/full")
    worker = workers.launch(home)
    outbox.wait_handled(outbox.produce(3))
    assert worker.terminate() == 0
    assert "the termination message cannot be written" in worker.log()
    assert "Traceback" not in worker.log()
