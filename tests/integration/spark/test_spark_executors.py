"""A driver with executors in processes of their own: one is killed, and a batch is larger than the driver's memory."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.spark import AGGREGATE, OPTIONS, PATIENCE, Drivers, Orders, spark_config, wait_handled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.worker import Worker

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

EXECUTORS = {
    "spark.master": "local-cluster[2,1,512]",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": OPTIONS,
    "spark.executor.extraJavaOptions": OPTIONS,
}
"""Two executors, each a process with a JVM of its own."""


@pytest.fixture
def drivers(tmp_path) -> Iterator[Drivers]:
    running = Drivers(tmp_path)
    yield running
    running.stop()


def processes_of(driver: Worker) -> dict[int, bytes]:
    """Return the command lines of the processes that the driver started, and of those that they started."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError, FileNotFoundError):
            if os.getsid(int(entry.name)) == driver.process.pid:
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def executors_of(driver: Worker) -> list[int]:
    return [pid for pid, command in processes_of(driver).items() if b"CoarseGrainedExecutorBackend" in command]


def test_an_executor_killed_in_the_middle_of_a_batch_doubles_nothing(drivers, database, tmp_path):
    orders = Orders(database, tmp_path / "files")
    slow = AGGREGATE.format(path=str(orders.files)) + (
        "\n\ndef hold(batches):\n"
        "    import pathlib, time\n"
        "    for batch in batches:\n"
        "        yield batch\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'reached').touch()\n"
        f"        while not pathlib.Path({str(tmp_path)!r}, 'gate').exists():\n"
        "            time.sleep(0.05)\n\n"
        "plain = handle\n\n"
        "def handle(messages, effects):\n"
        "    plain(messages.mapInArrow(hold, messages.schema), effects)\n"
    )
    config = spark_config(database, tmp_path, spark={"config": EXECUTORS, "partitions": 2})
    driver = drivers.launch(drivers.prepare(config, database.uri(), handler=slow))
    orders.produce(90)
    wait_until((tmp_path / "reached").exists, "tasks are in the middle of the batch", PATIENCE)
    running = executors_of(driver)
    assert len(running) == 2
    assert driver.report().executors == 2
    os.kill(running[0], signal.SIGKILL)
    (tmp_path / "gate").touch()
    wait_handled(driver, orders, 90)
    assert driver.report().attempt == 0, "Spark repeated the tasks; the batch was none the wiser"
    assert driver.terminate(60) == 0
    orders.check_exact()


def test_a_batch_larger_than_the_drivers_memory(drivers, database, tmp_path):
    """300 MB of payload in one micro-batch through a driver with 200 MB: only counts are ever collected."""
    target = {"sql": {"statement": "INSERT INTO public.sizes SELECT position, length(data->>'text') FROM batch"}}
    small = EXECUTORS | {
        "spark.driver.memory": "200m",
        "spark.testing.reservedMemory": "33554432",
        "spark.driver.maxResultSize": "1m",
    }
    config = spark_config(
        database, tmp_path, target=target, spark={"config": small, "partitions": 4}, delivery={"batchSize": 5000}
    )
    look = database.direct()
    look.execute("CREATE TABLE public.sizes (position bigint PRIMARY KEY, size int)")
    look.execute(
        "INSERT INTO outbox.messages (message_type, data) "
        "SELECT 'Large', jsonb_build_object('text', repeat(md5(n::text), 6250)) FROM generate_series(1, 1500) AS n"
    )
    driver = drivers.launch(drivers.prepare(config, database.uri()))
    report = driver.wait_for("the batch is stored", lambda report: report.handled >= 1500, PATIENCE)
    assert report.batches == 1, "one micro-batch"
    assert any(b"-Xmx200m" in line for line in processes_of(driver).values()), "the heap is as small as it says"
    found = look.execute("SELECT count(*), min(size), sum(size::bigint) FROM public.sizes").fetchone()
    assert found == (1500, 200_000, 300_000_000)
    assert driver.terminate(60) == 0
