"""What one batch writes: collected while the user's code runs, committed with the checkpoint in one transaction.

Nothing is visible to readers before that: rows wait in a staging table, files under a hidden name (staging.py,
files.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_core.errors import HandlerError
from outbox_core.report import Reason
from outbox_core.spec import SqlTarget
from outbox_worker.postgres.transactions.statement import StatementError, parse_batch_statement
from outbox_worker.targets.sql import SqlSink

if TYPE_CHECKING:
    from psycopg import sql
    from pyspark.sql import DataFrame

    from outbox_core.message import Batch
    from outbox_spark.offsets import OffsetRange
    from outbox_spark.options import ReadOptions
    from outbox_spark.writing.files import FileArea, PendingFile
    from outbox_spark.writing.staging import Staged, StagingArea
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.transaction import Transaction
    from outbox_worker.targets.batch_relation import Whole

_MAKE_DURABLE: Final = (
    "SELECT set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') = 'off'"
)


class Effects:
    """Given to `handle(messages, effects)`; each method may be called several times, in any order."""

    def __init__(
        self,
        staging: StagingArea,
        files: FileArea,
        whole: OffsetRange,
        messages: DataFrame | None = None,
        options: ReadOptions | None = None,
    ) -> None:
        """Begin a batch without effects; `messages`: what it has, where that is what was read by `options`."""
        self._staging = staging
        self._files = files
        self._whole = whole
        self._messages = messages
        self._options = options
        self.statements: list[tuple[SqlSink, Staged]] = []
        self.pending: list[PendingFile] = []

    @property
    def range(self) -> OffsetRange:
        """What `messages` lie in, after its start, up to and including its end: what a batch is known by.

        A batch that failed is run again over the same range, so what the function does outside of the transaction
        can be done once for each.
        """
        return self._whole

    def sql(self, rows: DataFrame, statement: str) -> None:
        """Stage `rows` now, and run `statement` over them, as the relation `batch`, in the checkpoint's transaction.

        Statements run in the order of the calls. The columns of `batch` are those of `rows`; `data` and `metadata` are
        jsonb and `transaction_id` is xid8 where they come unchanged from the messages.

        Raises:
            HandlerError: the rows have a column that PostgreSQL has no type for.

        """
        self.run(rows, statement, "the statement of effects.sql")

    def run(self, rows: DataFrame, statement: str, name: str) -> None:
        """Stage `rows` now, and run `statement` in that transaction; `name` is where people find it.

        Raises:
            HandlerError: as `sql` does.

        """
        try:
            parse_batch_statement(statement)
        except StatementError as error:
            raise HandlerError(f"{name} cannot be run: {error}", reason=Reason.STATEMENT_FAILED) from error
        staged = self._staging.load(rows)
        sink = SqlSink(SqlTarget(statement=statement), _always(staged.relation()), name=name)
        self.statements.append((sink, staged))

    def parquet(self, rows: DataFrame, path: str) -> None:
        """Append `rows` to the Parquet files of the directory `path`, visible once the checkpoint is stored.

        Raises:
            HandlerError: the path is not absolute.

        """
        directory = Path(path)
        if not directory.is_absolute():
            raise HandlerError(f"{path!r} is not an absolute path: name a directory on a volume of spec.spark.volumes")
        options = self._options if rows is self._messages else None
        self.pending += self._files.write(rows, directory, self._whole, options)

    def are_there(self, connection: Connection) -> bool:
        """Say whether all staged rows are still there: a crash of PostgreSQL empties every unlogged table."""
        return all(staged.is_complete(connection) for _, staged in self.statements)

    def apply(self, transaction: Transaction, batch: Batch) -> None:
        """Run the statements and list the files, in the transaction that stores the checkpoint.

        Files and Spark's own directory know of that commit outside of the database: no crash takes it back.
        """
        for sink, _ in self.statements:
            sink.handle(transaction, batch)
        if self.pending:
            self._files.list_in(transaction.connection, self.pending)
        transaction.connection.execute(_MAKE_DURABLE)


def _always(relation: sql.Composed) -> Whole:
    return lambda _batch: relation
