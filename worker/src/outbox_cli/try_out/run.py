"""The order of a run: folder and guard, server, shop, workers, the live table until the end, the ledger."""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_cli.errors import CommandError
from outbox_cli.try_out.guard import SIGNALS, Children, Guard
from outbox_cli.try_out.ledger import Account, format_accounts
from outbox_cli.try_out.place import Place, take_place
from outbox_cli.try_out.screen import Rates, Screen, build_notes, build_row, build_table
from outbox_cli.try_out.server import ROLE, Server, Template, copy_folder, find_programs, make_outbox, server_user
from outbox_core.plain import number_of_seconds, plain_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_cli.try_out.processors import Worker
    from outbox_cli.try_out.shop import Counters
    from outbox_worker.postgres.connection import Connection

BEGAN: Final = "OUTBOX_TRY_BEGAN"
"""Variable of the environment: when the command began, in seconds since 1970, where another program began it."""
_DRAIN_SECONDS: Final = 30.0
_TICK: Final = 0.25
_SILENT: Final = 20.0
"""Seconds without a first message after which something is wrong."""
_LATE: Final = 5.0
"""Seconds after which the reader is told what to try, whether or not the Ordered processor has an owner."""
_EAGER_TICK: Final = 0.05
"""Seconds between two looks until the first message is handled."""


class EndedError(BaseException):
    """A signal asked the run to end at once. Not an Exception: nothing may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """The signals that end a run: at once, or, while the table is shown, with a ledger."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.graceful = False
        self.stop: int | None = None
        self.ended: int | None = None
        for number in SIGNALS:
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: object) -> None:
        if os.getpid() != self._pid:
            return  # forked a moment ago, and not yet out of reach of the terminal's Ctrl-C: the guard ends it
        if self.graceful and number == signal.SIGINT and self.stop is None:
            self.stop = number
            return
        self.refuse()
        self.ended = number  # an exception can be lost in an import: `show` looks here
        raise EndedError(number)

    @staticmethod
    def refuse() -> None:
        """Let nothing interrupt the cleaning up."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@dataclass(slots=True)
class Run:
    """One run, once its folder is there."""

    place: Place
    guard: Guard
    signals: Signals
    screen: Screen
    began: float
    seconds: float | None
    children: Children = field(init=False)
    server: Server = field(init=False)
    counters: Counters = field(init=False)
    workers: list[Worker] = field(default_factory=list)
    shop_pid: int = 0
    noted: set[tuple[str, object]] = field(default_factory=set)

    def prepare(self) -> None:
        """Start the server, and import what the workers need while it starts."""
        self.place.furnish()
        server_user()
        programs = find_programs(self.place)
        template = Template(programs)
        self.children = Children(self.place, self.guard)
        self.server = Server(self.place, self.guard, self.children, programs)
        if template.is_there():
            self.server.start(lambda: copy_folder(template.path, self.place.data))
        else:
            self.screen.say("preparing the database: once for each version")
            self.server.start(lambda: template.initialise(self.place))
            self.server.wait()
            make_outbox(self.connect)
            self.server.stop()
            template.save(self.place.data, self.children, self.guard)
            self.server.start(lambda: None)
        self._start_shop()

    def _start_shop(self) -> None:
        from outbox_cli.try_out.pokes import write_programs
        from outbox_cli.try_out.processors import Worker, build_processors, import_worker, lay_out
        from outbox_cli.try_out.shop import Counters, run_shop

        processors = build_processors()
        lay_out(self.place, processors, self.server.uri)
        write_programs(self.place, self.server.programs)
        self.counters = Counters(mmap.mmap(-1, Counters.SIZE))
        self.server.wait()
        self.shop_pid = self.children.start(
            "shop", lambda: run_shop(self.server.uri, self.place.committed, self.counters)
        )
        import_worker()
        for processor in processors:
            self.workers += [
                Worker(processor, number, self.children, self.place) for number in range(processor.replicas)
            ]
        # Owners first; a standby has time.
        for worker in sorted(self.workers, key=lambda each: each.number):
            worker.start()

    def connect(self, database: str = "shop") -> Connection:
        """Connect to the embedded server."""
        import psycopg

        return psycopg.connect(
            host=str(self.place.socket), user=ROLE, dbname=database, autocommit=True,
            application_name="outbox-try", prepare_threshold=None,
        )  # fmt: skip

    def show(self) -> None:
        """Show the table until it is time to end."""
        rates = Rates()
        began = time.monotonic()
        flowing: float | None = None
        told = False
        self.signals.graceful = True
        while self.signals.stop is None:
            if self.signals.ended is not None:
                raise EndedError(self.signals.ended)
            now = time.monotonic()
            self._look()
            first = flowing is None and any(worker.handled for worker in self.workers)
            if first:
                flowing = now
                seconds = time.time() - self.began
                self.screen.say(f"messages flow: the first was handled {seconds:.1f} s after the command", "")
            elif flowing is not None:
                told = told or self._tell_pokes(late=now - flowing > _LATE)
            elif now - began > _SILENT:
                raise CommandError(self._explain_silence())
            self._tell_notes()
            self.screen.draw(self._table(rates, now), now, now=first)
            if flowing is not None and self.seconds is not None and now - flowing >= self.seconds:
                break
            time.sleep(_EAGER_TICK if flowing is None else _TICK)

    def _explain_silence(self) -> str:
        names = ["shop", *(worker.name for worker in self.workers)]
        ends = [f"\n  {name}: {line}" for name in names if (line := self.children.last_line(name))]
        return f"no message was handled within {_SILENT:.0f} s; the logs end with:{''.join(ends) or ' nothing'}"

    def _tell_pokes(self, *, late: bool) -> bool:
        """Say what to try, once it is known which process is to be killed."""
        from outbox_cli.try_out.pokes import build_pokes

        owner = next((worker for worker in self.workers if worker.is_owner), self.workers[0] if late else None)
        if owner is not None:
            self.screen.say(*build_pokes(self.place, owner.pid), "")
        return owner is not None

    def _tell_notes(self) -> None:
        """Say once what stands still, above the table: there the commands to paste are not cut and stay."""
        notes = build_notes(self.workers, str(self.place.folder / "outbox"))
        if new := [note for about, note in notes.items() if about not in self.noted]:
            self.screen.say(*new)
        self.noted = set(notes)

    def _table(self, rates: Rates, now: float) -> list[str]:
        rows = [build_row(worker, rates.note(worker.name, now, worker.handled)) for worker in self.workers]
        head = f"{plain_count(self.counters.committed, 'message')} produced, {self.counters.rolled_back} rolled back"
        return [head, *build_table(rows, self.screen.width)]

    def _look(self) -> None:
        """Wait for processes that ended, start workers again, and ask all of them how they are."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self.guard.gone(pid)
            self._note_end(pid, os.waitstatus_to_exitcode(status))
        for worker in self.workers:
            if worker.is_due():
                worker.start()
                self.screen.say(f"{worker.name} is started again, as pid {worker.pid}")
            worker.ask()

    def _note_end(self, pid: int, code: int) -> None:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        worker = next((each for each in self.workers if each.pid == pid), None)
        name = "shop" if worker is None else worker.name
        said = f" ({line})" if code > 0 and (line := self.children.last_line(name)) else ""
        if pid == self.server.pid:
            raise CommandError(
                f"PostgreSQL (pid {pid}) {how}: the run ends without a ledger; its log was {self.server.last_words()}"
            )
        if pid == self.guard.pid:
            raise CommandError(f"the guard of the run (pid {pid}) {how}: the run ends without a ledger")
        if worker is not None:
            worker.note_end()
            self.screen.say(f"{name} (pid {pid}) {how}{said}")
        if pid == self.shop_pid:
            self.shop_pid = 0
            if code:
                self.screen.say(f"the shop (pid {pid}) {how}{said}: nothing more is produced")

    def close(self) -> list[Account]:
        """Close the shop, let the workers handle what is left, and count."""
        from outbox_cli.try_out.counting import count, is_all_handled

        self.signals.graceful = False  # after --seconds the first Ctrl-C is still to come, and ends at once too
        if self.shop_pid:
            os.kill(self.shop_pid, signal.SIGTERM)
        self.screen.leave()
        self.screen.say("", "the shop closes, and what it produced is handled; Ctrl-C ends at once")
        deadline = time.monotonic() + _DRAIN_SECONDS
        with self.connect() as connection:
            while time.monotonic() < deadline and (self.shop_pid or not is_all_handled(connection, self.workers)):
                self._look()
                self._tell_notes()
                time.sleep(0.1)
            return count(connection, self.place.committed, self.workers)


def main(arguments: Sequence[str]) -> int:
    """Run `outbox try`; return the exit status."""
    options = _parse(arguments)
    try:
        if options.on is None:
            return _run(options)
        from outbox_cli.try_out.existing import look_at

        Screen().say(*look_at(options.on))
    except CommandError as err:
        print(f"outbox try: {err}", file=sys.stderr)  # noqa: T201  # a command line speaks
        return 1
    except EndedError as err:
        return 128 + err.number
    return 0


def _run(options: argparse.Namespace) -> int:
    """Run from the folder to the ledger, and leave nothing behind; return whether the ledger is exact."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]  # libpq's, of another database: the run's own is named in full
    began = float(os.environ.get(BEGAN) or time.time())
    screen = Screen()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the folder must not stay without its guard
    signals = Signals()
    place, swept = take_place(options.folder)
    guard = Guard(place.folder)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if swept:
            screen.say(f"a former run was killed and left {place.folder}: it is emptied and used again")
        if options.keep:
            place.mark_kept()
            guard.keep(place.folder)
        run = Run(place, guard, signals, screen, began, options.seconds)
        run.prepare()
        run.show()
        accounts = run.close()
        screen.say("", *format_accounts(accounts))
        return 0 if all(account.is_exact for account in accounts) else 1
    finally:
        signals.refuse()
        guard.finish()
        if place.is_kept:
            with contextlib.suppress(OSError):  # the terminal may be gone
                screen.say(_describe_kept(place.folder))


def _describe_kept(folder: Path) -> str:
    """Say what is left, however the run ended: the next run in this folder is refused."""
    programs = f"{folder}/server starts its database, {folder}/psql and {folder}/outbox look at it"
    kept = programs if (folder / "server").exists() else f"what its programs said is in {folder}/log"
    return f"everything is kept in {folder}: {kept}; rm -r {folder} removes it"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="outbox try",
        description="Watch processors work on an embedded PostgreSQL, disturb them, and see the ledger at the end.",
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=_positive, help="close the shop after so long (default: at Ctrl-C)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="of the run's files (default: outbox-try-UID in /tmp)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the folder at the end, and say how to look at it")
    parser.add_argument(
        "--on",
        metavar="URI",
        help="postgresql://…: start nothing and write nothing; say which outbox that database has",
    )
    options = parser.parse_args(arguments)
    if options.on is not None and (options.seconds or options.folder or options.keep):
        parser.error("--on starts nothing: leave out --seconds, --folder and --keep")
    return options


def _positive(text: str) -> float:
    seconds = number_of_seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError("0 seconds is no time; write for example 30")
    return seconds
