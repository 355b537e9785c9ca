"""The producers' process, as the demo's main program sees it: started, watched, told to come to an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from tests.tools.demo.place import CHECKOUT
from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.demo.database import Database


class Shop:
    """One run of `tests.tools.demo.producing.producers`."""

    def __init__(self, database: Database, log_dir: Path, *, messages: int, seconds: float, seed: int) -> None:
        """Start the process; it goes on until `finish`."""
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir, self.wanted = log_dir, messages
        self._last: dict[str, Any] = {"committed": 0, "transactions": {}}
        command = [sys.executable, "-m", "tests.tools.demo.producing.producers", "--log-dir", str(log_dir)]
        command += ["--messages", str(messages), "--seconds", str(seconds), "--seed", str(seed)]
        self._process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**os.environ, **database.libpq_environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._last = json.loads(line)

    @property
    def committed(self) -> int:
        """Messages committed so far, by the producers' own word."""
        return int(self._last["committed"])

    @property
    def kinds(self) -> dict[str, int]:
        """Transactions so far, by kind."""
        return dict(self._last["transactions"])

    def check(self) -> None:
        """Fail when the producers ended by themselves.

        Raises:
            DemoError: they did.

        """
        if self._process.poll() is not None:
            raise DemoError(f"the producers ended with status {self._process.returncode} while they were needed")

    def finish(self, within: float = 120) -> None:
        """Let the producers reach their number and end.

        Raises:
            DemoError: they failed.

        """
        if self._process.stdin:
            self._process.stdin.close()
        status = self._process.wait(within)
        self._reader.join(5)
        if status:
            raise DemoError(f"the producers failed with status {status}")

    def stop(self) -> None:
        """End the process, whatever it does (when the demo fails)."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(10)
