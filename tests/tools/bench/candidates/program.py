"""A candidate that runs as one program of its own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.support.servers.postgres import wait_until
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.case import Candidate
from tests.tools.bench.processes import Program, start

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.tools.bench.candidates.targets import Topic
    from tests.tools.ledger.account import Handled

CHECKOUT = Path(__file__).parents[4]

INSTALLED = CHECKOUT / ".venv" / "bench"
"""Where `tests/tools/cluster/setup.sh bench` links the peers."""


def installed(name: str) -> Path:
    """Return where a part of the peers is.

    Raises:
        FileNotFoundError: it is not installed.

    """
    found = INSTALLED / name
    if not found.exists():
        raise FileNotFoundError(f"no {found}: run tests/tools/cluster/setup.sh bench")
    return found


class ProgramCandidate(Candidate):
    """Its process, from start to end."""

    process = "peer"
    """How the table calls its process."""
    _program: Program | None = None

    def launch(
        self, command: Sequence[str], folder: Path, *, env: dict[str, str] | None = None, ready: str = "ready"
    ) -> None:
        """Start it in a folder of its own, and wait until its output has a text."""
        folder.mkdir(exist_ok=True)
        program = self._program = start(command, folder / "log", env=env, cwd=folder)

        def answers() -> bool:
            program.check()
            return ready in program.log()

        try:
            wait_until(answers, f"{self.name} says {ready!r}")
        except AssertionError as err:
            raise AssertionError(f"{err}\n{program.log()[-3000:]}") from err

    def check(self) -> None:
        """Fail if it has ended."""
        if self._program:
            self._program.check()

    @override
    def pids(self) -> Mapping[str, int]:
        return {self.process: self._program.pid} if self._program else {}

    @override
    def stop(self) -> None:
        if self._program:
            with suppress(ProcessLookupError):
                self._program.stop()


class Publisher(ProgramCandidate):
    """One that reads the outbox itself, and publishes into a queue or a topic of its own."""

    def __init__(self, name: str, settings: str, target: Queue | Topic) -> None:
        super().__init__(name, settings)
        self.target = target
        self.queue = target if isinstance(target, Queue) else None

    @override
    def count(self) -> int:
        self.check()
        return self.target.count()

    @override
    def take(self) -> Iterable[Handled]:
        return self.target.take()

    @override
    def stop(self) -> None:
        super().stop()
        self.target.close()
