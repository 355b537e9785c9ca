"""The alarm ends a handler wherever it comes. In a process of its own: signals go to the main thread."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest

from outbox_worker.shutdown import Waker
from tests.support.processes import many_files

BLOCKED_AFTER_THE_ALARM = """
import json, operator, signal, time
from collections import deque
from functools import partial
from outbox_worker.shutdown import Interrupted, Shutdown, Waker

shutdown, ends = Shutdown(Waker(), 30.0), []

def handle():
    # Nothing of it is bytecode: the alarm comes while it computes, and nobody asks for it before it sleeps.
    deque(map(operator.call, [partial(sum, range(5_000_000)), partial(time.sleep, 20)]), maxlen=0)

def handle_stubbornly():
    try:
        handle()
    except Interrupted:
        ends.append("swallowed")
        handle()

started = time.monotonic()
try:
    shutdown.limited(0.01, HANDLER)
except Interrupted:
    ends.append("ended")
took = time.monotonic() - started
print(json.dumps([ends, took, signal.getitimer(signal.ITIMER_REAL)[0]]))
"""


@pytest.mark.parametrize(
    ("handler", "expected"), [("handle", ["ended"]), ("handle_stubbornly", ["swallowed", "ended"])]
)
def test_an_alarm_that_comes_just_before_a_sleep_still_ends_it(handler, expected):
    program = BLOCKED_AFTER_THE_ALARM.replace("HANDLER", handler)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    ends, took, left = json.loads(done.stdout)
    assert ends == expected
    assert took < 15, "it slept to its end"
    assert left == 0, "no alarm is left for what comes next"


def test_a_wait_ends_with_what_comes_to_a_socket_however_many_files_are_open():
    with many_files():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"!")
            began = time.monotonic()
            Waker().wait(20, ours.fileno())
    assert time.monotonic() - began < 10
