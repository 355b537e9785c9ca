"""What the reader can do to the run, as lines to paste."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Final

from outbox_cli.try_out.processors import TOTALS
from outbox_cli.try_out.server import DATABASE, ROLE, server_user

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_cli.try_out.place import Place

_INSERT: Final = "INSERT INTO outbox.messages (partition_key, message_type, data) VALUES ($$mine$$, $$Hello$$, $${}$$)"
_HOLD: Final = "SELECT pg_current_xact_id(), pg_sleep(20)"
_EDIT: Final = (
    "UPDATE outbox.processor_checkpoints SET last_processed_transaction_id = "
    "(last_processed_transaction_id::text::bigint + 100)::text::xid8 WHERE processor_id = $${}$$"
)


def write_programs(place: Place, programs: Path) -> None:
    """Put `psql`, `outbox` and `server` into the run's folder, each told which database is meant."""
    connection = {"PGHOST": str(place.socket), "PGDATABASE": DATABASE, "PGUSER": ROLE}
    environment = connection | {
        name: value for name in ("PYTHONPATH", "PYTHONPYCACHEPREFIX") if (value := os.environ.get(name))
    }
    server = [str(programs / "bin" / "postgres"), "-D", str(place.data), "-k", str(place.socket)]
    if (user := server_user()) is not None:
        become = f"os.setgroups([]); os.setgid({user[1]}); os.setuid({user[0]})"
        code = f"import os; {become}; os.execv({server[0]!r}, {server!r})"
        server = [sys.executable, "-c", code]
    _write(place.folder / "server", {}, server)
    flags = ["-S"] if sys.flags.no_site else []
    _write(place.folder / "psql", connection, [str(programs / "bin" / "psql"), "-X"])
    _write(place.folder / "outbox", environment, [sys.executable, *flags, "-m", "outbox_cli"])


def _write(path: Path, environment: dict[str, str], command: list[str]) -> None:
    # No variable of the reader's shell may lead it to another database.
    lines = ["#!/bin/sh", "for name in $(env | sed -n 's/^\\(PG[A-Z]*\\)=.*/\\1/p'); do unset \"$name\"; done"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += [f'exec {shlex.join(command)} "$@"', ""]
    path.write_text("\n".join(lines))
    path.chmod(0o700)


def build_pokes(place: Place, totals_pid: int) -> list[str]:
    """Say what to try, with the exact lines."""
    psql, outbox = (shlex.quote(str(place.folder / name)) for name in ("psql", "outbox"))
    insert = shlex.quote(_INSERT)
    edit = shlex.quote(_EDIT.format(TOTALS))
    return [
        "Try, in another terminal:",
        "  a message of yours; each processor handles it once:",
        f"    {psql} -c {insert}",
        f"  the owner of {TOTALS} dies; the other process takes over when its lease of 3 s ends:",
        f"    kill -9 {totals_pid}",
        "  an open transaction that has an id: it holds back what reads by TransactionOrder, and nothing else:",
        f"    {psql} -c {shlex.quote(_HOLD)}",
        "  a checkpoint that another program moves: code 2, and nothing runs until a person decides:",
        f"    {psql} -c {edit}",
        "  who owns what, how far it is, what waits:",
        f"    {outbox} status",
    ]
