"""What a command works on: a database, or the resources of a cluster; the connections to the former; who acts and why.

No password is ever an argument: every user of the machine reads command lines.
"""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec

from outbox_cli.errors import Exit, UsageError
from outbox_cli.manifest import read_manifest
from outbox_core.spec import Source
from outbox_worker.postgres.connection import Connection, ConnectionFiles, connect_environment, connect_uri

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from outbox_cli.console import Console
    from outbox_operator.api.resources import Processor

    _How = ParamSpec("_How")
    _Connected = Callable[Concatenate[Connection, "Context", _How], Exit]
    _Command = Callable[Concatenate["Context", _How], Exit]

APPLICATION_NAME: Final = "outbox-cli"
DEFAULT_SCHEMA: Final = "outbox"
_LIBPQ: Final = ("PGSERVICE", "PGHOST", "PGHOSTADDR", "PGDATABASE")
DATABASE_HELP: Final = (
    "which database? --connection DIR (the files of a Secret), --connections DIR (with source/ and target/), "
    "--dsn-file FILE, or PGSERVICE or PGHOST in the environment"
)


@dataclass(frozen=True)
class Context:
    """One call of a command; `plugin`: as `kubectl outbox`."""

    options: argparse.Namespace
    console: Console
    environment: Mapping[str, str]
    plugin: bool

    @cached_property
    def manifest(self) -> Processor | None:
        """The processor of -f."""
        return read_manifest(self.options.file).processor if self.options.file else None

    @cached_property
    def source(self) -> Source:
        """The outbox: the manifest's, else the product's own table."""
        if self.manifest is not None:
            check_schema(self.options, self.manifest.spec.source)
            return self.manifest.spec.source
        schema = self.options.schema or DEFAULT_SCHEMA
        return Source.model_validate({"connection": {"secretRef": {"name": "unused"}}, "schemaName": schema})

    @property
    def schema(self) -> str:
        """The schema of checkpoints and functions."""
        return self.source.schema_name

    @property
    def processor_id(self) -> str | None:
        """The processor that is named, or the manifest's."""
        named: str | None = self.options.processor
        if self.manifest is None:
            return named
        if named not in (None, self.manifest.processor_id):
            raise UsageError(f"the manifest is of processor {self.manifest.processor_id}, not {named}")
        return self.manifest.processor_id

    @property
    def needed_processor(self) -> str:
        """The processor, by a command that needs one."""
        if self.processor_id is None:
            raise UsageError("which processor? name its processorId, or give its manifest with -f")
        return self.processor_id

    def means_cluster(self) -> bool:
        """Decide for a command that knows both: what is named wins, else a kubectl plugin means the cluster."""
        said = self.options
        database = said.connection or said.connections or said.dsn_file or said.target_connection
        cluster = said.namespace or said.context or said.kubeconfig or said.all_namespaces
        if database and cluster:
            raise UsageError("a database and a cluster are named: which of the two?")
        if not (database or cluster or self.plugin or self.has_environment):
            raise UsageError(f"{DATABASE_HELP}; for a cluster: -n NAMESPACE, --context, or `kubectl outbox`")
        if database or not (cluster or self.plugin):
            return False
        if said.file or said.schema:
            raise UsageError(
                "-f and --schema are about a database, and this means a cluster: leave them out, or name a database "
                "(--connection DIR, --dsn-file FILE; with libpq's environment `outbox` in place of `kubectl outbox`)"
            )
        return True

    @property
    def has_environment(self) -> bool:
        """Libpq's variables name a database."""
        return any(self.environment.get(name) for name in _LIBPQ)

    @property
    def secret_directory(self) -> Path | None:
        """The directory that the source's Secret would be mounted at, if one is named."""
        if self.options.connection is not None:
            return Path(self.options.connection)
        return None if self.options.connections is None else Path(self.options.connections) / "source"

    @property
    def target_directory(self) -> Path | None:
        """The files of the target's database, where checkpoint and effects are in another one than the messages."""
        if self.options.target_connection is not None:
            return Path(self.options.target_connection)
        target = None if self.manifest is None else self.manifest.spec.target
        if target is None or target.database is None:
            return None
        if self.options.connections is not None:
            return Path(self.options.connections) / "target"
        raise UsageError(
            "this processor's checkpoint is in its target's database: name that with --target-connection DIR, or both "
            "with --connections DIR (DIR/source and DIR/target)"
        )

    @property
    def names_both(self) -> bool:
        """The database of the messages is named beside the target's."""
        is_named = self.secret_directory is not None or self.options.dsn_file is not None or self.has_environment
        return self.target_directory is not None and is_named

    def connect(self) -> Connection:
        """Open an autocommit connection to the database that holds checkpoints and claims."""
        if self.target_directory is not None:
            return ConnectionFiles(self.target_directory).connect(APPLICATION_NAME)
        return self.connect_source()

    def connect_source(self) -> Connection:
        """Open an autocommit connection to the database that holds the messages."""
        if self.secret_directory is not None:
            return ConnectionFiles(self.secret_directory).connect(APPLICATION_NAME)
        if self.options.dsn_file is not None:
            return connect_uri(self.options.dsn_file, APPLICATION_NAME)
        if self.has_environment:
            return connect_environment(APPLICATION_NAME)
        raise UsageError(DATABASE_HELP)


def check_schema(options: argparse.Namespace, source: Source) -> None:
    """Refuse a schema that is named and is not the manifest's."""
    if options.schema is not None and options.schema != source.schema_name:
        raise UsageError(f"--schema {options.schema} is not the manifest's schemaName {source.schema_name}")


def against_database(run: _Connected[_How]) -> _Command[_How]:
    """Make a command of a function that needs the database of checkpoints and claims."""
    return _connect(run, Context.connect)


def against_source(run: _Connected[_How]) -> _Command[_How]:
    """Make a command of a function that needs the database of the messages, and no other."""
    return _connect(run, Context.connect_source)


def _connect(run: _Connected[_How], connect: Callable[[Context], Connection]) -> _Command[_How]:
    def command(context: Context, /, *args: _How.args, **how: _How.kwargs) -> Exit:
        with connect(context) as connection:
            return run(connection, context, *args, **how)

    return command


def whoami() -> str:
    """Name the person for the record: user@host; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def need_reason(options: argparse.Namespace) -> None:
    """Refuse a decision without a reason; a dry run needs none."""
    if options.reason is None and not options.dry_run:
        raise UsageError("--reason is missing: it is kept in the audit log")
