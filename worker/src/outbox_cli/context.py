"""What a command works on: a database, or the resources of a cluster; and the connection to the former.

No password is ever an argument: every user of the machine reads command lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_cli.errors import UsageError
from outbox_cli.manifest import read_manifest
from outbox_core.spec import Source
from outbox_worker.postgres.connection import ConnectionFiles, connect_environment, connect_uri

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from outbox_worker.postgres.connection import Connection


APPLICATION_NAME: Final = "outbox-cli"
DEFAULT_SCHEMA: Final = "outbox"
_LIBPQ: Final = ("PGSERVICE", "PGHOST", "PGHOSTADDR", "PGDATABASE")
_DATABASE_HELP: Final = (
    "which database? --connection DIR (the files of a Secret), --connections DIR (with source/ and target/), "
    "--dsn-file FILE, or PGSERVICE or PGHOST in the environment"
)


class ContextKind(StrEnum):
    """Where a command acts."""

    DATABASE = "database"
    CLUSTER = "cluster"


def choose_context(options: argparse.Namespace, environment: Mapping[str, str], *, plugin: bool) -> ContextKind:
    """Decide for a command that knows both: what is named wins; a kubectl plugin means the cluster.

    Raises:
        UsageError: both are named, or nothing says which, or a cluster is meant and something of a database is said.

    """
    place = _find_place(options, environment, plugin=plugin)
    if place is ContextKind.CLUSTER and (options.file or options.schema):
        raise UsageError(
            "-f and --schema are about a database, and this means a cluster: leave them out, or name a database "
            "(--connection DIR, --dsn-file FILE; with libpq's environment `outbox` in place of `kubectl outbox`)"
        )
    return place


def _find_place(options: argparse.Namespace, environment: Mapping[str, str], *, plugin: bool) -> ContextKind:
    database = any(
        getattr(options, name, None) for name in ("connection", "connections", "dsn_file", "target_connection")
    )
    cluster = any(getattr(options, name, None) for name in ("namespace", "context", "kubeconfig", "all_namespaces"))
    if database and cluster:
        raise UsageError("a database and a cluster are named: which of the two?")
    if database or cluster:
        return ContextKind.DATABASE if database else ContextKind.CLUSTER
    if plugin:
        return ContextKind.CLUSTER
    if has_environment(environment):
        return ContextKind.DATABASE
    raise UsageError(f"{_DATABASE_HELP}; for a cluster: -n NAMESPACE, --context, or `kubectl outbox`")


def has_environment(environment: Mapping[str, str]) -> bool:
    """Say whether libpq's variables name a database."""
    return any(environment.get(name) for name in _LIBPQ)


def secret_directory(options: argparse.Namespace) -> Path | None:
    """Return the directory that a Secret would be mounted at, if one is named."""
    if options.connection is not None:
        return Path(options.connection)
    return None if options.connections is None else Path(options.connections) / "source"


def target_directory(options: argparse.Namespace) -> Path | None:
    """Return the files of the target's database, where checkpoint and effects are in another one than the messages.

    Raises:
        UsageError: the manifest says that they are, and nothing says where.

    """
    if options.target_connection is not None:
        return Path(options.target_connection)
    files = getattr(options, "file", None)
    target = read_manifest(files, cluster="", uid="").processor.spec.target if files else None
    if target is None or target.database is None:
        return None
    if options.connections is not None:
        return Path(options.connections) / "target"
    raise UsageError(
        "this processor's checkpoint is in its target's database: name that with --target-connection DIR, or both "
        "with --connections DIR (DIR/source and DIR/target)"
    )


def names_source(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Say whether the database of the messages is named too."""
    return secret_directory(options) is not None or options.dsn_file is not None or has_environment(environment)


def connect(options: argparse.Namespace, environment: Mapping[str, str]) -> Connection:
    """Open an autocommit connection to the database that holds checkpoints and claims.

    Raises:
        UsageError: it is not named.
        OutboxError: it cannot be reached, or the files make no sense.

    """
    directory = target_directory(options)
    if directory is not None:
        return ConnectionFiles(directory).connect(APPLICATION_NAME)
    return connect_source(options, environment)


def connect_source(options: argparse.Namespace, environment: Mapping[str, str]) -> Connection:
    """Open an autocommit connection to the database that holds the messages.

    Raises:
        UsageError: it is not named.
        OutboxError: it cannot be reached, or the files make no sense.

    """
    directory = secret_directory(options)
    if directory is not None:
        return ConnectionFiles(directory).connect(APPLICATION_NAME)
    if options.dsn_file is not None:
        return connect_uri(options.dsn_file, APPLICATION_NAME)
    if has_environment(environment):
        return connect_environment(APPLICATION_NAME)
    raise UsageError(_DATABASE_HELP)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a database command is about: the schema, the outbox in it, and perhaps one processor."""

    schema: str
    source: Source
    processor_id: str | None

    @property
    def needed(self) -> str:
        """The processor.

        Raises:
            UsageError: none is named.

        """
        if self.processor_id is None:
            raise UsageError("which processor? name its processorId, or give its manifest with -f")
        return self.processor_id


def check_schema(options: argparse.Namespace, source: Source) -> None:
    """Compare the schema that is named with the manifest's.

    Raises:
        UsageError: it is another one.

    """
    if options.schema is not None and options.schema != source.schema_name:
        raise UsageError(f"--schema {options.schema} is not the manifest's schemaName {source.schema_name}")


def read_subject(options: argparse.Namespace) -> Subject:
    """Put it together from a manifest, where one is given, and from what is named beside it."""
    named = getattr(options, "processor", None)
    files = getattr(options, "file", None)
    if files:
        processor = read_manifest(files, cluster="", uid="").processor
        source = processor.spec.source
        check_schema(options, source)
        if named is not None and named != processor.processor_id:
            raise UsageError(f"the manifest is of processor {processor.processor_id}, not {named}")
        return Subject(source.schema_name, source, processor.processor_id)
    schema = options.schema or DEFAULT_SCHEMA
    source = Source.model_validate({"connection": {"secretRef": {"name": "unused"}}, "schemaName": schema})
    return Subject(schema, source, named)
