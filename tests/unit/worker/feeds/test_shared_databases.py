"""What processors of one process share of the database, and what each has for itself."""

from __future__ import annotations

import pytest

from outbox_core.config import ProcessorConfig
from outbox_worker.databases import SharedDatabases
from outbox_worker.settings import read_settings
from tests.support.worker import build_config

SETTINGS = read_settings([], {})


def config(**source):
    return ProcessorConfig.model_validate(build_config(None, {"log": {}}, source=source))


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        pytest.param({"messageTypes": ["Paid"]}, True, id="another type"),
        pytest.param({"cursor": "Snapshot"}, True, id="another cursor"),
        pytest.param({"publications": ["bank"]}, False, id="another publication"),
        pytest.param({"schemaName": "bank"}, False, id="another schema"),
        pytest.param({"table": {"schemaName": "public", "name": "events"}}, False, id="another table"),
    ],
)
def test_one_look_says_of_all_of_a_table_whether_a_message_came(source, is_same):
    shared = SharedDatabases(SETTINGS, "outbox")
    first, other = shared.of(config(), SETTINGS), shared.of(config(**source), SETTINGS)
    assert (first.arrivals is other.arrivals) is is_same
    assert first.wal is other.wal
    assert first.target is other.source
