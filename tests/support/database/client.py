"""A database client in a process of its own, to be frozen with SIGSTOP at a chosen moment.

Run as a program it reads one statement a line (a JSON string) and answers one line: rows, or the error's SQLSTATE. The
tests drive it step by step, so a freeze falls exactly where they want it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from tests.support.processes import freeze

ROOT = Path(__file__).parents[3]
LOST = "connection lost"


class Client:
    """The test's side of such a process."""

    def __init__(self, uri: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.database.client", uri],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.backend = self.run("SELECT pg_backend_pid()")[0][0]

    def send(self, statement: str) -> None:
        """Start a statement without waiting for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(statement) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Rows, or an error's SQLSTATE, or LOST."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(self, statement: str) -> Any:
        self.send(statement)
        return self.receive()

    def freeze(self) -> None:
        freeze(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    connection = psycopg.connect(sys.argv[1], prepare_threshold=None)
    for line in sys.stdin:
        try:
            cursor = connection.execute(json.loads(line))
            answer: Any = [list(row) for row in cursor.fetchall()] if cursor.description else []
        except psycopg.Error as err:
            answer = LOST if connection.closed else err.sqlstate
        sys.stdout.write(json.dumps(answer, default=str) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
    os._exit(0)
