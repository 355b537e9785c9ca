"""Options of format("outbox"): names, values, and what to write instead."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.spec import StartType
from outbox_spark.options import parse_options


def test_the_directory_alone_reads_the_products_own_outbox_from_the_beginning():
    options = parse_options({"connection": "/secret"})
    assert options.connection == Path("/secret")
    assert (options.source.schema_name, options.source.table, options.source.publications) == ("outbox", None, [])
    assert (options.batch_size, options.partitions, options.end, options.floor) == (10_000, 2, None, BEGINNING)
    assert (options.batch_bytes, options.interval) == (None, 0.0)


def test_names_are_compared_without_regard_to_case():
    options = parse_options({"Connection": "/secret", "messagetypes": "A, B", "BATCHSIZE": "5"})
    assert options.source.message_types == ["A", "B"]
    assert options.batch_size == 5


def test_a_table_that_exists_already():
    table = parse_options({"connection": "/secret", "table": "shop.events"}).source.table
    assert table is not None
    assert (table.schema_name, table.name) == ("shop", "events")


def test_the_whole_source_as_json():
    json = '{"connection": {"secretRef": {"name": "db"}}, "schemaName": "o", "publications": ["shop"]}'
    source = parse_options({"connection": "/secret", "source": json}).source
    assert (source.schema_name, source.publications) == ("o", ["shop"])


def test_starts():
    def start(text):
        return parse_options({"connection": "/secret", "start": text}).start

    assert start("815:42") == Checkpoint(815, 42)
    assert start("End").type is StartType.END
    assert start("2026-01-01T00:00:00Z").timestamp == datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({}, "option connection is missing", id="no connection"),
        pytest.param({"connection": "/s", "password": "x"}, "option password is not taken", id="a secret"),
        pytest.param(
            {"connection": "/s", "maxRows": "5"}, "option maxrows is unknown; known are batchbytes", id="a typo"
        ),
        pytest.param({"connection": "/s", "batchSize": "0"}, "must be a whole number above 0", id="an empty batch"),
        pytest.param({"connection": "/s", "start": "soon"}, "none of: beginning, end", id="no start"),
        pytest.param({"connection": "/s", "start": "2026-01-01T00:00:00"}, "RFC 3339", id="a time of no zone"),
        pytest.param({"connection": "/s", "end": "815"}, "is not a checkpoint; write it as", id="half an end"),
        pytest.param({"connection": "/s", "source": "{}"}, "the options do not name a source", id="no source"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_remedy(given, says):
    with pytest.raises(ConfigurationError, match=says):
        parse_options(given)
