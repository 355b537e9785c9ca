"""A driver with executors in processes of their own: one is killed, in a batch larger than the driver's memory."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.spark import OPTIONS, PATIENCE, Orders, spark_config

if TYPE_CHECKING:
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


STORE = """
def handle(messages, effects):
    held = messages.mapInArrow(hold, messages.schema)
    effects.sql(held, "INSERT INTO public.sizes SELECT position, length(data->>'text') FROM batch")
    effects.parquet(messages, {files!r})

def hold(batches):
    import pathlib, time
    for batch in batches:
        yield batch
        pathlib.Path({folder!r}, "reached").touch()
        while not pathlib.Path({folder!r}, "gate").exists():
            time.sleep(0.05)
"""
"""An application that stays in the middle of a batch until the file `gate` is there."""


def test_a_batch_larger_than_the_drivers_memory_in_which_an_executor_is_killed_doubles_nothing(
    drivers, database, tmp_path
):
    """300 MB of payload in one micro-batch through a driver with 200 MB: only counts are ever collected."""
    small = EXECUTORS | {
        "spark.driver.memory": "200m",
        "spark.testing.reservedMemory": "33554432",
        "spark.driver.maxResultSize": "1m",
    }
    orders = Orders(database, tmp_path / "files")
    config = spark_config(database, tmp_path, spark={"config": small, "partitions": 4}, delivery={"batchSize": 5000})
    look = database.direct()
    look.execute("CREATE TABLE public.sizes (position bigint PRIMARY KEY, size int)")
    look.execute(
        "INSERT INTO outbox.messages (message_type, data) "
        "SELECT 'Large', jsonb_build_object('text', repeat(md5(n::text), 6250)) FROM generate_series(1, 1500) AS n"
    )
    application = STORE.format(folder=str(tmp_path), files=str(orders.files))
    driver = drivers.launch(drivers.prepare(config, database.uri(), handler=application))
    wait_until((tmp_path / "reached").exists, "tasks are in the middle of the batch", PATIENCE)
    running = executors_of(driver)
    assert len(running) == 2
    assert driver.report().executors == 2
    os.kill(running[0], signal.SIGKILL)
    (tmp_path / "gate").touch()
    report = driver.wait_for("the batch is stored", lambda report: report.handled >= 1500, PATIENCE)
    assert (report.batches, report.attempt) == (1, 0), "one micro-batch: Spark repeated the tasks, not the batch"
    assert any(b"-Xmx200m" in line for line in processes_of(driver).values()), "the heap is as small as it says"
    found = look.execute("SELECT count(*), min(size), sum(size::bigint) FROM public.sizes").fetchone()
    assert found == (1500, 200_000, 300_000_000)
    positions = [row[0] for row in look.execute("SELECT position FROM public.sizes ORDER BY 1").fetchall()]
    wait_until(lambda: len(orders.positions_in_files()) >= 1500, "all files have their names")
    assert orders.positions_in_files() == positions
    assert driver.terminate(60) == 0
