"""The data source `outbox`: `spark.readStream.format("outbox")` and `spark.read.format("outbox")`.

Thin: options.py reads the options, planning.py and offsets.py split ranges, reader.py reads them. Offsets are
checkpoints. Register it with `spark.dataSource.register(OutboxDataSource)`; it needs nothing of the operator.

`commit` is left alone: Spark calls it one batch late, and for the last batch of an idle or bounded query never.
For effects and checkpoint in one transaction run the query by the driver (`python -m outbox_spark`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from typing_extensions import override

from outbox_spark.columns import MESSAGE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT: Final = "outbox"


class OutboxDataSource(DataSource):
    """Messages of an outbox, as a stream or up to an end."""

    @classmethod
    @override
    def name(cls) -> str:
        return FORMAT

    @override
    def schema(self) -> StructType:
        return MESSAGE_SCHEMA

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        # Spark asks for name and schema in a process of their own: it shall load no more than they need.
        from outbox_spark.options import parse_options
        from outbox_spark.planning import OutboxStreamReader

        return OutboxStreamReader(parse_options(self.options))

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from outbox_spark.options import parse_options
        from outbox_spark.planning import OutboxBatchReader

        return OutboxBatchReader(parse_options(self.options))
