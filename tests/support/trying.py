"""`outbox try` as a user runs it: a process whose output is read while it runs, and what is left when it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.servers.postgres import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = (str(Path(sys.executable).with_name("outbox")), "try")
ROOT = Path(__file__).resolve().parents[2]
_MARK = "OUTBOX_TRY_TEST"


def _hear_signals() -> None:
    """Undo what a program inherits where the tests run under nohup, or in the background of a shell."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Trial:
    """One run."""

    folder: Path
    cache: Path
    command: Sequence[str] = PROGRAM
    mark: str = field(default_factory=lambda: str(uuid.uuid4()))
    out: Path = Path()
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        if self.out == Path():
            self.out = self.folder.with_suffix(".out")

    def start(self, *options: str, **environment: str) -> None:
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [*self.command, "--folder", str(self.folder), *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OUTBOX_CACHE": str(self.cache), _MARK: self.mark, **environment},
                start_new_session=True,
                preexec_fn=_hear_signals,  # noqa: PLW1509 - before any thread
            )

    def start_at_a_terminal(self, columns: int) -> None:
        """Start it with a terminal of that width for its output; what it shows there is copied to `out`."""
        outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        clean = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [*self.command, "--folder", str(self.folder)],
            stdout=inner,
            stderr=inner,
            stdin=subprocess.DEVNULL,
            env={**clean, "OUTBOX_CACHE": str(self.cache), _MARK: self.mark},
            start_new_session=True,
        )
        os.close(inner)
        threading.Thread(target=self._copy, args=(outer,), daemon=True).start()

    def _copy(self, terminal: int) -> None:
        with self.out.open("wb", buffering=0) as out, contextlib.suppress(OSError):  # raised when the process ended
            while part := os.read(terminal, 65_536):
                out.write(part.replace(b"\r\n", b"\n"))
        os.close(terminal)

    @property
    def said(self) -> str:
        return self.out.read_text()

    def wait_for(self, pattern: str, seconds: float = 60.0, *, after: int = 0) -> re.Match[str]:
        """Wait until the output, from a place on, matches; fail with all of it."""
        found: list[re.Match[str]] = []

        def matches() -> bool:
            match = re.compile(pattern, re.MULTILINE).search(self.said, after)
            found[:] = [match] if match else []
            assert match or self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            return bool(match)

        try:
            wait_until(matches, pattern, seconds)
        except AssertionError as err:
            raise AssertionError(f"{err}\n{self.said}") from err
        return found[0]

    def wait_flowing(self) -> None:
        self.wait_for(r"^messages flow: ")

    def paste(self, beginning: str) -> subprocess.CompletedProcess[str]:
        """Run the printed line that contains this, in a shell, as the reader would paste it."""
        line = self.wait_for(rf"^    (.*{beginning}.*)$")[1]
        return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)

    def psql(self, text: str) -> str:
        done = subprocess.run(
            [self.folder / "psql", "-Atc", text], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def send(self, number: signal.Signals) -> None:
        """As the terminal does it: to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, seconds: float = 60.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.said}") from None

    def left(self) -> list[str]:
        """Processes and files of the run that are there now."""
        found = [str(self.folder)] if self.folder.exists() else []
        found += [str(path) for path in self.cache.glob("try/.*")]
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and self._is_ours(entry):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}")
        return found

    def _is_ours(self, entry: Path) -> bool:
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            if str(self.folder) in str((entry / "cwd").readlink()):
                return True
            return f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
        except OSError:
            return False

    def close(self) -> None:
        """After a test that failed: end it by the way of a user who is in a hurry."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(20)
