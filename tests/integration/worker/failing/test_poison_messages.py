"""A message that kills its process is found by counting crashes, and ends like any whose attempts ran out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.failing import DEADLY_HANDLER, KEYS, Failing
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_TARGET

MOST_CRASHES = 6
"""Two until the place is suspected, two of the message alone; and two for good measure, where it was held before."""


@pytest.fixture
def failing(outbox):
    return Failing(outbox)


class Restarted:
    """A worker as a kubelet keeps it: started again whenever it ends."""

    def __init__(self, workers, home):
        self.workers = workers
        self.home = home
        self.crashes = 0
        self.worker = workers.launch(home)

    def until(self, condition, what):
        """Each process has all the time of a wait: it begins when the lease of the one before is over."""
        while not condition():
            wait_until(lambda: self.worker.process.poll() is not None or condition(), what)
            if self.worker.process.poll() is not None:
                assert self.worker.process.returncode == 137
                self.crashes += 1
                assert self.crashes <= MOST_CRASHES, self.worker.log()[-4000:]
                self.worker = self.workers.launch(self.home)


def run(failing, workers, deadly, *, count=30, **delivery):
    config = failing.config(PYTHON_TARGET, **{"partitioned": False, "batchSize": 10} | delivery)
    # One of ten is the poison message: 5 are tried, then 2 (5 and 6), then 7 alone.
    home = workers.prepare(config, failing.outbox.database.uri(), handler=DEADLY_HANDLER)
    (home / "deadly").write_text(" ".join(f"message-{n}" for n in deadly))
    failing.produce(count)
    return Restarted(workers, home)


@pytest.mark.parametrize(
    ("delivery", "lost"),
    [
        pytest.param({"guarantee": "Transactional"}, {7}, id="its partition was blocked"),
        pytest.param(
            {"blocks": "Key", "guarantee": "AtLeastOnce"}, set(range(7, 30, KEYS)), id="its key stays blocked"
        ),
        pytest.param(
            {"guarantee": "Transactional", "cursor": "Snapshot"}, {7}, id="each restart opens a snapshot range"
        ),
    ],
)
def test_what_kills_its_process_is_isolated_and_becomes_a_dead_letter(failing, workers, delivery, lost):
    running = run(failing, workers, [7], whenExhausted="DeadLetter", **delivery)
    running.until(lambda: set(failing.handled()) == set(range(30)) - lost, "all but the killer are handled")
    assert failing.dead() == [("message-7", 1, "ProcessKilled", "blocks" in delivery)]
    failing.assert_once_and_in_order()
    assert running.crashes == 4


def test_a_held_message_that_kills_is_found_too(failing, workers):
    """It fails first, like any other, and kills when it is tried again: the checkpoint has passed it long ago."""
    failing.break_at(7)
    running = run(failing, workers, [], blocks="Key", whenExhausted="DeadLetter",
                  retry={"maxAttempts": 1000, "initialBackoff": "50ms", "maxBackoff": "100ms"})  # fmt: skip
    free = set(range(30)) - set(range(7, 30, KEYS))
    running.until(lambda: free <= set(failing.handled()) and failing.held()[0] > ("message-7", 0), "it is held")
    (running.home / "deadly").write_text("message-7")
    failing.mend()
    running.until(lambda: len(failing.dead()) == 1, "the killer is dead")
    assert failing.dead()[0][0::2] == ("message-7", "ProcessKilled")
    assert set(failing.handled()) == free
    assert running.crashes == 3


def test_stopped_at_a_killer_it_stays_so_until_the_handler_is_changed(failing, workers):
    running = run(failing, workers, [7])
    stopped: list[Any] = []

    def is_stopped():
        try:
            stopped[:] = [running.worker.report()]
        except (OSError, ValueError):
            return False
        return stopped[0].state == "Stopped"

    running.until(is_stopped, "it stopped")
    assert "at message 'message-7'" in stopped[0].message
    assert "2 processes in a row died" in stopped[0].message
    assert failing.handled() == list(range(7))
    (running.home / "deadly").unlink()
    (running.home / "handler/orders.py").write_text(DEADLY_HANDLER + "\n")
    running.until(lambda: failing.handled() == list(range(30)), "all is handled")


def test_killed_from_outside_no_message_is_condemned(failing, workers):
    """Killed again and again at one checkpoint, in the middle of a batch, by nobody's message."""
    config = failing.config(
        PYTHON_TARGET, partitioned=False, batchSize=10, whenExhausted="DeadLetter", guarantee="Transactional"
    )
    home = workers.prepare(config, failing.outbox.database.uri(), handler=DEADLY_HANDLER)
    (home / "deadly").touch()
    failing.produce(30)
    for _ in range(3):
        # The effects wait for this lock: every worker is killed in its first batch.
        with failing.outbox.database.direct(autocommit=False) as blocker:
            blocker.execute("LOCK TABLE handled")
            worker = workers.launch(home)
            worker.wait_state("Active", "Running")
            wait_until(lambda: _waits(failing), "the effects wait")
            worker.kill()
            blocker.rollback()
    workers.launch(home)
    failing.wait_handled(set(range(30)))
    assert failing.handled() == list(range(30))
    assert failing.dead() == []


def test_killed_while_a_message_that_failed_waits_that_message_is_not_condemned(failing, workers):
    """It was tried alone, as a possible poison message, and its process had an answer.

    It dies later, of something else.
    """
    config = failing.config(
        PYTHON_TARGET,
        partitioned=False,
        batchSize=10,
        whenExhausted="DeadLetter",
        guarantee="Transactional",
        retry={"maxAttempts": 1000, "initialBackoff": "10m", "maxBackoff": "10m", "jitter": 0},
    )
    home = workers.prepare(config, failing.outbox.database.uri(), handler=DEADLY_HANDLER)
    (home / "deadly").touch()
    failing.break_at(0)
    failing.produce(1)
    for _ in range(5):
        worker = workers.launch(home)
        worker.wait_state("Retrying", "HandlerFailed")
        worker.kill()
    failing.mend()
    workers.launch(home)
    failing.wait_handled({0})
    assert failing.dead() == []


def _waits(failing):
    row = failing.connection.execute(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'public.handled'::regclass"
    ).fetchone()
    return row[0] > 0
