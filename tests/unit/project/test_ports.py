"""The ports that tests choose for their servers."""

from __future__ import annotations

import itertools
import subprocess
import sys

from tests.support.servers import postgres


def test_two_processes_do_not_choose_the_same_port(monkeypatch):
    monkeypatch.setattr(postgres, "_turns", itertools.count(7_000))
    mine = postgres.free_port()
    code = (
        "import itertools; from tests.support.servers import postgres; "
        "postgres._turns = itertools.count(7_000); print(postgres.free_port())"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 18_000 <= mine < int(other.stdout)


def test_a_port_is_held_for_a_while_only():
    """Each holds a file: a process of the tests chooses thousands."""
    for _ in range(300):
        postgres.free_port()
    assert len(postgres._chosen) == postgres._HELD
