"""What the heartbeat looks at for status, and that it stops looking in time for the next beat."""

from __future__ import annotations

import time

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.processor.state import initial_state
from outbox_worker.observe.observer import Observer
from outbox_worker.observe.sight import Sight
from outbox_worker.observe.status import Identity, ProcessStatus
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.database.contract import put
from tests.support.servers.postgres import build_source, wait_until

SOURCE = build_source()


def build_observer(lease):
    fields = {"resource": {"cluster": "c", "namespace": "n", "name": "a", "uid": "u"}, "generation": 1}
    config = ProcessorConfig.model_validate(fields | {"processorId": "orders", "source": SOURCE})
    status = ProcessStatus(config, Identity("pod", "uid", "instance"), initial_state(time.monotonic()))
    key = ProcessorKey("outbox", "orders")
    return Observer(key, status, Sight(key), lease=lease), status


@pytest.mark.parametrize(("lease", "complete"), [(15.0, True), (0.001, False)])
def test_it_looks_no_longer_than_a_share_of_the_lease(database, lease, complete):
    put(database.direct(), (10, 1))
    observer, status = build_observer(lease)
    observer.observe(database.connect())
    assert status.report().checkpoints == []

    observer.start(MessageReader(SOURCE))
    observer.observe(database.connect())

    report = status.report()
    assert [view.pair for view in report.checkpoints] == ["10:1"]
    assert (report.lag is not None, report.high_water_mark is not None) == (complete, complete)


HELD = (
    "INSERT INTO outbox.held_messages (processor_id, key, place, transaction_id, position, message_id, message_type, "
    "data, blocks, behind, attempts, crash_count, next_attempt_at) "
    "VALUES ('orders', 'k', 1, '5', 1, 'm', 't', '{}', true, false, 1, 0, clock_timestamp() + interval '1 hour')"
)
MESSAGE = "INSERT INTO outbox.messages (partition_key, message_type, data) VALUES ('k', 't', '{}')"


@pytest.mark.parametrize("statement", [HELD, MESSAGE], ids=["a message is held", "a message waits"])
def test_it_looks_again_where_the_server_wrote_and_always_where_something_waits(database, statement):
    writer, connection = database.direct(), database.connect()
    put(writer, (10, 1))
    observer, status = build_observer(15.0)
    observer.start(MessageReader(SOURCE))

    def looks() -> bool:
        status.set_observed(lag=None)
        observer.observe(connection)
        return status.report().lag is not None

    assert looks()
    wait_until(lambda: not looks(), "nothing was written, and it does not look", 30.0)
    writer.execute(statement)
    assert looks()
    report = status.report()
    assert report.lag is not None
    assert (report.lag.messages, report.failures.held) == ((0, 1) if statement == HELD else (1, 0))
    assert [looks() for _ in range(3)] == [True, True, True]
