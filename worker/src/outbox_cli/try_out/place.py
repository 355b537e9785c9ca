"""The run's folder: who may have it, and what a former run left in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from outbox_cli.errors import CommandError
from outbox_cli.try_out.cache import lives

_LOCK: Final = ".outbox-try"
"""The file that is locked; what it says tells a run's folder from every other one."""
_SAYS: Final = "the folder of an `outbox try`, pid"
_KEPT: Final = "kept"
_ANOTHER: Final = "name another folder with --folder DIR"
_NEEDED_MEGABYTES: Final = 150
_LONGEST_SOCKET: Final = 100
"""Bytes of a Unix socket's path that every system takes (Linux 107, macOS 103)."""
_PATIENCE: Final = 10.0
"""Seconds that a run which was just killed has to be cleaned up by its guard."""


class Place:
    """The folder of one run, locked by it, and the folders in it.

    `logs` has what server and workers say, `committed` the producers' commit logs, `connections` the connection's files
    as a worker's pod has them, `handler` the Python handler's file.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self.lock = folder, lock
        self.data = folder / "data"
        self.socket = folder / "socket"
        self.logs = folder / "log"
        self.committed = folder / "committed"
        self.connections = folder / "connections"
        self.handler = folder / "handler"

    def furnish(self) -> None:
        """Make the folders that every run has."""
        for path in (self.data, self.socket, self.logs, self.committed, self.connections / "source", self.handler):
            path.mkdir(parents=True, exist_ok=True)
        for path in (self.data, self.socket):
            path.chmod(0o700)

    def mark_kept(self) -> None:
        """Say to a later run that the data shall stay."""
        (self.folder / _KEPT).touch()

    @property
    def is_kept(self) -> bool:
        """Say whether it was marked so."""
        return (self.folder / _KEPT).exists()


def take_place(named: Path | None) -> tuple[Place, bool]:
    """Make or take over the folder, and lock it; say whether a former run had left something in it."""
    try:
        folder = (named or Path(tempfile.gettempdir()) / f"outbox-try-{os.getuid()}").absolute()
    except OSError as err:
        raise CommandError(f"no folder for temporary files may be written ({err.strerror}): {_ANOTHER}") from err
    if len(os.fsencode(folder / "socket" / ".s.PGSQL.5432")) > _LONGEST_SOCKET:
        raise CommandError(f"the path {folder} is too long for a Unix socket: name a shorter one with --folder DIR")
    try:
        while True:
            _check(folder)
            place = Place(folder, _lock(folder))
            # The guard of a former run removes folder and lock: what was locked may be gone already.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(place.lock).st_ino == (folder / _LOCK).stat().st_ino:
                    break
            os.close(place.lock)
        if place.is_kept:
            kept = f"{folder} has the data that a former run kept (--keep)"
            raise CommandError(f"{kept}: remove it (rm -r {folder}), or {_ANOTHER}")
        found = _sweep(folder)
    except PermissionError as err:
        raise CommandError(f"{err.filename or folder} may not be written by this user: {_ANOTHER}") from err
    except OSError as err:
        raise CommandError(f"{folder} cannot be made ({err.strerror}): {_ANOTHER}") from err
    try:
        _check_room(folder)
    except CommandError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return place, found


def _check(folder: Path) -> None:
    """Make the folder, or make sure that it is a former run's and ours."""
    # As root the server is another user, who must reach its data below.
    mode = 0o711 if os.getuid() == 0 else 0o700
    if not folder.parent.is_dir():
        raise CommandError(f"{folder.parent} is not there: make it (mkdir -p {folder.parent}), or {_ANOTHER}")
    closed = find_closed(folder.parent) if os.getuid() == 0 else None
    if closed is not None:
        raise CommandError(
            f"{folder} is below {closed}, which the user nobody may not enter, and root's PostgreSQL runs as nobody: "
            "name a folder elsewhere with --folder DIR, or run this as another user"
        )
    try:
        folder.mkdir(mode=mode)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise CommandError(f"{folder} is no folder of this user: remove it, or {_ANOTHER}") from None
        if not _is_of_a_run(folder):
            raise CommandError(f"{folder} has files that are not of `outbox try`: {_ANOTHER}") from None
    folder.chmod(mode)


def find_closed(path: Path) -> Path | None:
    """Return the outermost of a path and its parents that not every user may enter."""
    path = path.resolve()
    return next((each for each in reversed((path, *path.parents)) if not each.stat().st_mode & 0o001), None)


def _is_of_a_run(folder: Path) -> bool:
    """Say whether the folder says so itself, or is empty: a run that has only begun has not written that yet."""
    with contextlib.suppress(FileNotFoundError):
        if (folder / _LOCK).read_bytes().startswith(_SAYS.encode()):
            return True
    return all(path.name == _LOCK and not path.stat().st_size for path in folder.iterdir())


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            pid = os.pread(descriptor, 99, 0).decode().removeprefix(_SAYS).strip()
            if (pid and lives(int(pid))) or time.monotonic() > deadline:
                os.close(descriptor)
                raise CommandError(
                    f"another `outbox try` runs in {folder} (pid {pid or 'unknown'}): end it (kill {pid or 'PID'}), or "
                    + _ANOTHER
                ) from err
            time.sleep(0.05)
        else:
            # Always as long, so that it is whole at every moment.
            os.pwrite(descriptor, f"{_SAYS} {os.getpid():>10}\n".encode(), 0)
            return descriptor


def _sweep(folder: Path) -> bool:
    """Remove what a run left that was killed together with its guard; end its server, should it still be there."""
    left = [path for path in folder.iterdir() if path.name != _LOCK]
    if not left:
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (folder / "data" / "postmaster.pid").read_text().splitlines()
        if Path(lines[1]) == folder / "data" and _answers(folder / "socket" / ".s.PGSQL.5432"):
            os.kill(int(lines[0]), signal.SIGQUIT)
            time.sleep(1.0)
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return True


def _answers(path: Path) -> bool:
    """Say whether a server is at the socket. Where none is, the number in an old file may be any program's by now."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(os.fsencode(path)) == 0


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free // 1_000_000
    if free < _NEEDED_MEGABYTES:
        raise CommandError(
            f"{folder} has {free} MB left, and the database needs {_NEEDED_MEGABYTES} MB: make room, or name a folder "
            "on another disk with --folder DIR"
        )
