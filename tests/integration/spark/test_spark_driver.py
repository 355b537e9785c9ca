"""`python -m outbox_spark` as a real process: effects and checkpoint together, over kills, losses and restores."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.clone import Primary
from tests.support.servers.postgres import Database, wait_until
from tests.support.servers.proxy import CommitCutter, Cut
from tests.support.spark import AGGREGATE, PATIENCE, Drivers, Orders, spark_config, wait_handled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.worker import Worker

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def orders(database, tmp_path) -> Orders:
    return Orders(database, tmp_path / "files")


@pytest.fixture
def home(drivers: Drivers, database: Database, orders: Orders, tmp_path: Path) -> Path:
    """The files of a processor with the aggregating application."""
    handler = AGGREGATE.format(path=str(orders.files))
    return drivers.prepare(spark_config(database, tmp_path), database.uri(), handler=handler)


def kill_between_commit_and_sparks_log(kill: Callable[[], None], orders: Orders) -> None:
    """Kill once a batch is committed, while the driver empties the staging table and before Spark notes the batch.

    A reader's lock holds that emptying up; it holds up neither the executors' copies nor the merge.
    """
    names = orders.connection.execute("SELECT table_name FROM outbox.spark_staging").fetchall()
    before = orders.stored()
    reader = orders.database.direct(autocommit=False)
    for (name,) in names:
        reader.execute(f"LOCK TABLE outbox.{name} IN ACCESS SHARE MODE")
    orders.produce(50)
    wait_until(lambda: orders.stored() != before, "the batch is committed", PATIENCE)
    kill()
    reader.rollback()


def batches_in(log: Path) -> list[int]:
    """The numbers of the batches in one of Spark's own logs."""
    return sorted(int(entry.name) for entry in log.iterdir() if entry.name.isdecimal())


def is_noted(query: Path) -> bool:
    """Whether Spark has noted of every batch that it planned that it is over."""
    planned, over = (batches_in(query / log) for log in ("offsets", "commits"))
    return planned == over


def store_waits(orders: Orders) -> bool:
    waiting = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND query LIKE '%store_processor_checkpoint%'"
    )
    return orders.connection.execute(waiting).fetchone() is not None


def end_gracefully(driver: Worker) -> None:
    assert driver.terminate(60) == 0, driver.log()[-4000:]


def test_killed_in_the_middle_of_a_batch_and_its_directory_lost_it_goes_on_from_the_row(
    drivers, shared_jvm, home, orders, tmp_path
):
    orders.produce(250)
    driver = drivers.launch(home)
    wait_handled(driver, orders, 250)
    orders.produce(130)
    wait_handled(driver, orders, 380)
    report = driver.wait_for("all is counted", lambda report: report.handled == 380, PATIENCE)
    assert (report.state, report.conflicts.count, report.start_from_used) == ("Active", 0, True)
    assert report.batches >= 4, "the read limit is 100"
    orders.check_exact()
    orders.produce(400)

    def is_writing():
        """A batch may be written between two looks, so another one follows."""
        found = any(orders.files.glob("_outbox/*/*"))
        if not found:
            orders.produce(20)
        return found

    wait_until(is_writing, "files are being written", PATIENCE)
    driver.kill()
    shutil.rmtree(tmp_path / "query")
    again = drivers.launch(home, jvm=shared_jvm)
    wait_handled(again, orders, orders.produced)
    end_gracefully(again)
    orders.check_exact()
    assert not any(orders.files.glob("_outbox/*/*")), "what the first driver left is swept"


def test_a_batch_run_again_after_a_kill_is_told_0_and_skipped(drivers, shared_jvm, home, orders):
    """The driver loses its JVM between its commit and Spark's own log."""
    orders.produce(40)
    driver = drivers.launch(home)
    wait_handled(driver, orders, 40)
    java = java_of(driver)
    kill_between_commit_and_sparks_log(lambda: os.kill(java, signal.SIGKILL), orders)
    assert driver.process.wait(PATIENCE) == 1, "without a JVM it ends, and what runs it starts it again"
    assert orders.handled() == 90
    again = drivers.launch(home, jvm=shared_jvm)
    report = again.wait_for("the replay is answered", lambda report: "0" in report.conflicts.by_code, PATIENCE)
    assert report.conflicts.open is None
    orders.produce(10)
    wait_handled(again, orders, 100)
    assert orders.codes() == [0]
    end_gracefully(again)
    orders.check_exact()


def test_a_restored_directory_is_told_0_and_a_restored_database_3_which_waits_for_a_person(
    drivers, shared_jvm, home, orders, tmp_path
):
    orders.produce(40)
    driver = drivers.launch(home, jvm=shared_jvm)
    wait_handled(driver, orders, 40)
    earlier = orders.stored()
    (query,) = (tmp_path / "query").glob("*/*/query")
    wait_until(lambda: is_noted(query), "Spark has noted the batch", PATIENCE)
    shutil.copytree(tmp_path / "query", tmp_path / "backup")
    orders.produce(60)
    wait_handled(driver, orders, 100)
    end_gracefully(driver)
    assert not orders.has_live_lease()
    assert is_noted(query), "stopped after the batch and Spark's note of it"
    # The directory is behind the row.
    shutil.rmtree(tmp_path / "query")
    shutil.copytree(tmp_path / "backup", tmp_path / "query")
    again = drivers.launch(home, jvm=shared_jvm)
    orders.produce(30)
    wait_handled(again, orders, 130)
    end_gracefully(again)
    orders.check_exact()
    assert set(orders.codes()) <= {0}
    # The row is behind the directory.
    later = orders.stored()
    transaction_id, position = earlier.split(":")
    orders.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_transaction_id = %s::text::xid8, "
        "last_processed_position = %s",
        (transaction_id, int(position)),
    )
    blocked = drivers.launch(home, jvm=shared_jvm)
    report = blocked.wait_state("Blocked", "CheckpointOlder", PATIENCE)
    conflict = report.conflicts.open
    assert (conflict.code, conflict.expected, conflict.stored) == (3, later, earlier)
    assert orders.handled() == 130
    end_gracefully(blocked)
    # A person rewinds to where the effects are: a new directory goes on from there.
    config = json.loads((home / "processor.json").read_text())
    config["resolution"] = {"conflictId": conflict.id, "action": "Rewind", "pair": later, "decidedBy": "a person"}
    (home / "processor.json").write_text(json.dumps(config))
    orders.produce(10)
    decided = drivers.launch(home, jvm=shared_jvm)
    wait_handled(decided, orders, 140)
    end_gracefully(decided)
    orders.check_exact()


@pytest.mark.nightly
def test_a_batch_planned_before_its_transactions_were_lost_hides_no_message(
    drivers, shared_jvm, home, orders, database, tmp_path
):
    """A failover or a crash took back what was planned, and its ids are handed out again: the last is open."""
    orders.produce(40)
    driver = drivers.launch(home, jvm=shared_jvm)
    wait_handled(driver, orders, 40)
    end_gracefully(driver)
    usual, orders.connection = orders.connection, database.direct(autocommit=False)
    orders.produce(10)
    (transaction_id, position) = orders.connection.execute(
        "SELECT transaction_id::text, position FROM outbox.messages ORDER BY position DESC LIMIT 1"
    ).fetchone()
    late, orders.connection = orders.connection, usual
    (query,) = (tmp_path / "query").glob("*/*/query")
    last = batches_in(query / "offsets")[-1]
    version, settings, _ = (query / f"offsets/{last}").read_text().splitlines()
    planned = json.dumps({"transaction_id": transaction_id, "position": position})
    (query / f"offsets/{last + 1}").write_text(f"{version}\n{settings}\n{planned}")
    lost = f"{transaction_id}:{position}"
    again = drivers.launch(home, jvm=shared_jvm)
    wait_until(lambda: orders.stored() == lost or not query.exists(), "the directory is used, or is not", PATIENCE)
    assert orders.stored() != lost, "stored although the transaction is open"
    late.commit()
    wait_handled(again, orders, 50)
    end_gracefully(again)
    orders.check_exact()
    assert orders.codes() == []


def test_a_driver_that_lost_ownership_is_told_4_and_rolls_back(drivers, shared_jvm, home, orders, tmp_path):
    """Somebody takes the processor by force in the middle of a batch."""
    gate, reached = tmp_path / "gate", tmp_path / "gate.reached"
    slow = f"""
import pathlib, time

def handle(messages, effects):
    effects.sql(messages.groupBy().count(), "INSERT INTO public.taken SELECT count FROM batch")
    effects.parquet(messages.select("position"), {str(orders.files)!r})
    pathlib.Path({str(reached)!r}).touch()
    while not pathlib.Path({str(gate)!r}).exists():
        time.sleep(0.05)
"""
    (home / "handler/orders.py").write_text(slow)
    orders.connection.execute("CREATE TABLE public.taken (count bigint)")
    orders.produce(10)
    driver = drivers.launch(home, jvm=shared_jvm)
    wait_until(reached.exists, "the batch is in hand", PATIENCE)
    orders.connection.execute(
        "SELECT * FROM outbox.claim_processor('orders', 'other', 'shop', 'orders', 'uid-2', true)"
    )
    gate.touch()
    driver.wait_state("ClaimRefused", "ClaimHeld", PATIENCE)
    assert orders.connection.execute("SELECT count(*) FROM public.taken").fetchone() == (0,)
    assert not list(orders.files.glob("*.parquet")), "files of a checkpoint that is not stored are not shown"
    orders.connection.execute("SELECT outbox.release_claim('orders', 'uid-2')")
    wait_until(
        lambda: orders.connection.execute("SELECT sum(count) FROM public.taken").fetchone() == (10,),
        "the batch is handled again, by itself",
        PATIENCE,
    )
    # Asked to stop in the middle of a batch, it finishes that one, and Spark notes it before the driver ends.
    gate.unlink()
    reached.unlink()
    orders.produce(5)
    wait_until(reached.exists, "the next batch is in hand", PATIENCE)
    driver.send(signal.SIGTERM)
    gate.touch()
    assert driver.process.wait(60) == 0, driver.log()[-4000:]
    assert orders.connection.execute("SELECT sum(count) FROM public.taken").fetchone() == (15,)
    rows = orders.connection.execute("SELECT position FROM outbox.messages ORDER BY 1").fetchall()
    assert orders.positions_in_files() == [row[0] for row in rows]
    (query,) = (tmp_path / "query").glob("*/*/query")
    assert is_noted(query)


def test_files_alone_over_a_commit_whose_answer_is_lost(drivers, shared_jvm, database, orders, tmp_path):
    """`target.parquet` without an application; the server commits a batch, and the driver does not hear of it.

    Later a program holds the checkpoint's row: no file is shown before its checkpoint is committed.
    """
    cutter = CommitCutter(database.port)
    config = spark_config(database, tmp_path, target={"parquet": {"path": str(orders.files)}})
    driver = drivers.launch(drivers.prepare(config, cutter.uri(database.uri())), jvm=shared_jvm)

    def wait_for_files(count: int) -> None:
        orders.produce(count)
        driver.wait_for("all are there", lambda _: len(orders.positions_in_files()) == orders.produced, PATIENCE)

    wait_for_files(40)
    cutter.arm(Cut.AFTER, after=b"spark_files", once=True)
    wait_for_files(30)
    assert cutter.cuts == 1
    wait_for_files(10)
    assert driver.report().conflicts.count == 0, "it finds out what is stored, and Spark goes on from there"
    before = orders.positions_in_files()
    holder = database.direct(autocommit=False)
    with orders.connection.transaction():
        orders.produce(20)
        # Its transaction id is above the messages': it holds the row, not the high-water mark.
        holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
    wait_until(lambda: store_waits(orders), "the files are written, and their checkpoint is being stored", PATIENCE)
    assert orders.positions_in_files() == before, "files of a checkpoint that is not stored are not shown"
    holder.rollback()
    wait_for_files(10)
    end_gracefully(driver)
    cutter.close()
    assert orders.codes() == []
    rows = orders.connection.execute("SELECT position FROM outbox.messages ORDER BY 1").fetchall()
    assert orders.positions_in_files() == [row[0] for row in rows]


def test_a_missing_application_is_named_and_its_coming_noticed(drivers, shared_jvm, home, orders):
    config = json.loads((home / "processor.json").read_text())
    config["delivery"]["retry"]["maxAttempts"] = 2  # each costs seconds
    (home / "processor.json").write_text(json.dumps(config))
    module = home / "handler/orders.py"
    text = module.read_text()
    module.unlink()
    orders.produce(10)
    driver = drivers.launch(home, jvm=shared_jvm)
    report = driver.wait_state("Unavailable", "ApplicationMissing", PATIENCE)
    assert "put a key orders.py into the ConfigMap" in report.message
    module.write_text("def something_else(): pass")
    driver.wait_for("the function is missed", lambda report: "neither transform" in report.message, PATIENCE)
    assert orders.stored() is None
    module.write_text(text)
    wait_handled(driver, orders, 10)
    # A mistake in the code: the batch is not stored, the traceback is told, and a mended module is taken.
    module.write_text("def handle(messages, effects):\n    raise KeyError('total')\n")
    stored = orders.stored()
    end_gracefully(driver)
    driver = drivers.launch(home, jvm=shared_jvm)
    orders.produce(10)
    report = driver.wait_for("the mistake is told", lambda report: report.last_error is not None, PATIENCE)
    assert "orders.handle failed: KeyError: 'total'" in report.message
    assert "orders.py" in report.last_error, "the user's own traceback"
    driver.wait_state("Stopped", "AttemptsExhausted", PATIENCE)
    assert orders.stored() == stored
    module.write_text(text)
    wait_handled(driver, orders, 20)
    end_gracefully(driver)
    orders.check_exact()


@pytest.fixture
def primary() -> Iterator[Primary]:
    server = Primary()
    yield server
    server.stop()


def test_a_crash_of_postgresql_empties_what_was_staged_and_loses_no_message(drivers, shared_jvm, primary, tmp_path):
    """The rows wait for the merge, in an unlogged table; the lease outlives the crash."""
    name = primary.create("outbox_template")
    with primary.connect(name) as connection:
        connection.execute(
            "UPDATE outbox.database_identity SET database_oid = (SELECT oid FROM pg_database "
            "WHERE datname = current_database())"
        )
    database = Database(primary, name, primary.port)
    orders = Orders(database, tmp_path / "files")
    config = spark_config(database, tmp_path, delivery={"leaseDuration": "2m"})
    handler = AGGREGATE.format(path=str(orders.files))
    driver = drivers.launch(drivers.prepare(config, database.uri(), handler=handler), jvm=shared_jvm)
    orders.produce(40)
    wait_handled(driver, orders, 40)
    blocker = database.direct(autocommit=False)
    # Writers wait; and unlike a stronger lock it takes no transaction id, which would hold the high-water mark.
    blocker.execute("LOCK TABLE public.per_minute IN EXCLUSIVE MODE")
    with primary.connect(name) as producer:
        producer.execute("SET synchronous_commit = on")  # what is produced outlives the crash
        orders.connection = producer
        orders.produce(50)
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'public.per_minute'::regclass"
        wait_until(lambda: producer.execute(waits).fetchone() == (1,), "the merge waits", PATIENCE)
    primary.kill()  # with the lock still held: the merge must not commit before, for this server loses late commits
    database.close()
    primary.start()
    with primary.connect(name) as again:
        orders.connection = again
        wait_handled(driver, orders, 90)
        end_gracefully(driver)
        orders.check_exact()


def java_of(driver: Worker) -> int:
    """The driver's child that is a JVM."""
    tasks = Path(f"/proc/{driver.process.pid}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return next(pid for pid in children if "java" in str(Path(f"/proc/{pid}/exe").readlink()))


def test_state_that_does_not_go_with_the_row_is_refused_not_guessed(drivers, shared_jvm, database, orders, tmp_path):
    counting = """
from pyspark.sql import functions as f

def transform(messages):
    return messages.groupBy("message_type").agg(f.count("*").alias("orders"))
"""
    statement = (
        "INSERT INTO public.counted (message_type, orders) SELECT message_type, orders FROM batch "
        "ON CONFLICT (message_type) DO UPDATE SET orders = excluded.orders"
    )
    config = spark_config(database, tmp_path, target={"sql": {"statement": statement}})
    config["spark"]["application"] = {"module": "orders"}
    home = drivers.prepare(config, database.uri(), handler=counting)
    orders.connection.execute("CREATE TABLE public.counted (message_type text PRIMARY KEY, orders bigint)")

    def counted() -> int:
        row = orders.connection.execute("SELECT coalesce(sum(orders), 0) FROM public.counted").fetchone()
        return int(row[0]) if row else 0

    driver = drivers.launch(home)
    orders.produce(40)
    driver.wait_for("state is built", lambda _: counted() == 40, PATIENCE)
    kill_between_commit_and_sparks_log(driver.kill, orders)
    again = drivers.launch(home, jvm=shared_jvm)
    again.wait_for("the replay is answered", lambda report: "0" in report.conflicts.by_code, PATIENCE)
    orders.produce(10)
    again.wait_for("the replay rebuilt the state", lambda _: counted() == 100, PATIENCE)
    end_gracefully(again)
    shutil.rmtree(tmp_path / "query")
    refused = drivers.launch(home, jvm=shared_jvm)
    report = refused.wait_state("Unavailable", "QueryStateMismatch", PATIENCE)
    assert "state is never guessed" in report.message
    assert counted() == 100
    end_gracefully(refused)
