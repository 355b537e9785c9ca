"""What is wrong leaves the checkpoint untouched, says what to do, and recovers by itself when it is mended."""

from __future__ import annotations

import pytest
from psycopg import sql

from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, Outbox, build_config


def test_a_wrong_password(outbox, workers):
    with outbox.database.server.connect("postgres") as admin:
        admin.execute(sql.SQL("GRANT ALL ON DATABASE {} TO locked").format(sql.Identifier(outbox.database.name)))
    outbox.connection.execute("GRANT ALL ON SCHEMA outbox TO locked")
    outbox.connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA outbox TO locked")
    outbox.connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO locked")
    outbox.connection.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO locked")
    outbox.connection.execute("GRANT ALL ON ALL FUNCTIONS IN SCHEMA outbox TO locked")
    ids = outbox.produce(5)
    wrong = outbox.database.uri("locked:open%20says-me")
    home = workers.prepare(build_config(outbox.database, SQL_TARGET, source={"schema": "Verify"}), wrong)
    worker = workers.launch(home)
    report = worker.wait_state("Unavailable", "AuthenticationFailed")
    assert "locked" in report.message
    assert worker.get("/readyz")[0] == 503
    assert worker.get("/livez")[0] == 200
    assert "says-me" not in worker.log() + report.model_dump_json()
    (home / "connections/source/uri").write_text(outbox.database.uri("locked:open%20sesame"))
    outbox.wait_handled(ids)


def test_a_database_that_is_down_and_comes_up(outbox, workers):
    ids = outbox.produce(5)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(ids)
    name = outbox.database.name
    with outbox.database.server.connect("postgres") as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        report = worker.wait_for("it is down", lambda r: r.state == "Unavailable")
        assert report.attempt == 0
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(sql.Identifier(name)))
    outbox.connection = outbox.database.direct()
    more = outbox.produce(5, start=5)
    outbox.wait_handled(ids + more)
    assert worker.report().conflicts.count == 0


def test_nobody_answers_at_the_address(outbox, workers):
    ids = outbox.produce(5)
    home = workers.prepare(build_config(outbox.database, SQL_TARGET), "postgresql://postgres@127.0.0.1:1/x")
    worker = workers.launch(home)
    report = worker.wait_state("Unavailable", "DatabaseUnavailable")
    assert (report.attempt, outbox.stored()) == (0, None)
    (home / "connections/source/uri").write_text(outbox.database.uri())
    outbox.wait_handled(ids)


def test_a_secret_without_its_keys(outbox, workers):
    home = workers.prepare(build_config(outbox.database, SQL_TARGET), "")
    worker = workers.launch(home)
    report = worker.wait_state("Unavailable", "ConnectionSecretInvalid")
    assert report.message.startswith("the Secret db, mounted at ")
    assert "`uri`" in report.message
    (home / "connections/source/uri").write_text(outbox.database.uri())
    worker.wait_state("Active")


def test_a_schema_that_is_absent_with_verify(empty_database, workers):
    config = build_config(empty_database, {"log": {}}, source={"schema": "Verify"})
    worker = workers.start(config, empty_database.uri())
    report = worker.wait_state("Unavailable", "SchemaMissing")
    assert "outbox migrate" in report.message
    manager = workers.start(build_config(empty_database, {"log": {}}, processor_id="other"), empty_database.uri())
    manager.wait_state("Active")
    worker.wait_state("Active")


def test_a_table_without_the_columns(outbox, workers):
    outbox.connection.execute("CREATE TABLE public.old_outbox (id bigint PRIMARY KEY, payload jsonb NOT NULL)")
    table = {"schemaName": "public", "name": "old_outbox", "columns": {"data": "payload"}}
    worker = workers.start(build_config(outbox.database, SQL_TARGET, source={"table": table}), outbox.database.uri())
    report = worker.wait_state("Unavailable", "SchemaMismatch")
    assert "transaction_id" in report.message
    outbox.connection.execute("DROP TABLE public.old_outbox")
    outbox.connection.execute(
        "CREATE TABLE public.old_outbox (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, transaction_id xid8 "
        "NOT NULL DEFAULT pg_current_xact_id(), message_id text NOT NULL, message_type text NOT NULL, payload jsonb)"
    )
    outbox.connection.execute("CREATE INDEX ON public.old_outbox (transaction_id, position)")
    outbox.connection.execute("INSERT INTO old_outbox (message_id, message_type, payload) VALUES ('m-1', 't', '{}')")
    outbox.wait_handled(["m-1"])


INVALID = {
    "no such module": (None, "there is no module orders"),
    "a syntax error": ("def handle(batch, connection)\n    pass\n", "SyntaxError"),
    "an import that is not installed": (
        "import numpy_of_the_shop\ndef handle(b, c): pass\n",
        "imports numpy_of_the_shop",
    ),
    "an error at import": ("raise RuntimeError('no configuration')\n", "no configuration (orders.py:1)"),
    "no such function": ("def handel(batch, connection): pass\n", "has no function handle"),
    "a wrong signature": ("def handle(batch): pass\n", "called as handle(batch, connection)"),
    "an async function": ("async def handle(batch, connection): pass\n", "not async"),
}


def test_invalid_handlers_one_after_the_other_and_then_a_good_one(outbox, workers):
    ids = outbox.produce(5)
    home = workers.prepare(build_config(outbox.database, PYTHON_TARGET), outbox.database.uri())
    worker = workers.launch(home)
    for handler, message in INVALID.values():
        if handler is not None:
            (home / "handler/orders.py").write_text(handler)
        report = worker.wait_for(message, lambda r, message=message: message in r.message)
        assert (report.state, report.reason) == ("Unavailable", "HandlerInvalid")
    assert outbox.stored() is None
    (home / "handler/orders.py").write_text(PYTHON_HANDLER)
    outbox.wait_handled(ids)


REJECTING = """
def handle(batch, connection):
    for message in batch:
        connection.execute("INSERT INTO handled (message_id) VALUES (%s)", (message.message_id,))
        check(message)

def check(message):
    if message.json()["n"] == 3:
        raise ValueError(f"order {message.message_id} has no customer")
"""


def test_a_payload_that_the_handler_rejects(outbox, workers):
    ids = outbox.produce(5)
    delivery = {"retry": {"maxAttempts": 3, "initialBackoff": "50ms", "maxBackoff": "100ms"}}
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler=REJECTING)
    worker = workers.launch(home)
    report = worker.wait_state("Stopped", "AttemptsExhausted")
    assert "3 attempts at message 'message-3' of type 'OrderPlaced', " in report.message
    assert "(HandlerFailed)" in report.message
    assert "ValueError: order message-3 has no customer (orders.py:9)" in report.message
    assert report.last_error is not None
    assert report.last_error.startswith('  File "')
    assert "in check" in report.last_error
    assert "outbox_worker" not in report.last_error
    assert "customer" not in str(report.checkpoints)
    assert outbox.handled() == ids[:2], "what was good before it got through"
    assert worker.get("/livez")[0] == 200
    # The ConfigMap is mended: it goes on by itself.
    (home / "handler/orders.py").write_text(PYTHON_HANDLER)
    outbox.wait_handled(ids)


def test_what_a_handler_raises_ends_its_batch_and_never_the_worker(outbox, workers):
    """`asyncio.CancelledError` and a group are no `Exception`."""
    ids = outbox.produce(5)
    delivery = {"retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "100ms"}}
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    handler = REJECTING.replace("ValueError(", "asyncio.CancelledError(").replace(
        "def check", "import asyncio\ndef check"
    )
    home = workers.prepare(config, outbox.database.uri(), handler=handler)
    worker = workers.launch(home)
    report = worker.wait_state("Stopped", "AttemptsExhausted")
    assert "CancelledError: order message-3 has no customer" in report.message
    (home / "handler/orders.py").write_text(PYTHON_HANDLER)
    outbox.wait_handled(ids)


FORKING_HANDLER = """
import pathlib, signal, sys, time
def fork(end):
    child = os.fork()
    if child == 0:
        end()
        return True
    until = time.monotonic() + 5
    while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    if not found[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with pathlib.Path("ends").open("a") as file:
        file.write("runs on\\n" if not found[0] else f"{os.waitstatus_to_exitcode(found[1])}\\n")
    return False
def handle(batch, connection):
    if any(fork(end) for end in (lambda: None, sys.exit, lambda: sys.exit(3), lambda: 1 / 0)):
        return
    insert(batch, connection)
""" + PYTHON_HANDLER.replace("def handle", "def insert")
"""Forks children that return, leave and fail in its place, and writes down how each has ended."""


def test_a_child_that_a_handler_forks_never_goes_on_as_the_worker(outbox, workers):
    ids = outbox.produce(5)
    worker = workers.start(build_config(outbox.database, PYTHON_TARGET), outbox.database.uri(), handler=FORKING_HANDLER)
    outbox.wait_handled(ids)
    assert (worker.directory / "ends").read_text().split() == ["0", "0", "3", "1"]


@pytest.mark.parametrize("guarantee", ["Transactional", "AtLeastOnce"])
@pytest.mark.parametrize("target", [PYTHON_TARGET, SQL_TARGET], ids=["python", "sql"])
def test_one_bad_message_of_a_large_batch_is_found(outbox, workers, target, guarantee):
    """`handled` refuses it, so that the target's own database says no, whoever asks."""
    outbox.connection.execute("ALTER TABLE handled ADD CHECK (message_id <> 'message-700')")
    ids = outbox.produce(1500)
    delivery = {"batchSize": 1000, "guarantee": guarantee, "retry": {"maxAttempts": 2, "initialBackoff": "50ms"}}
    worker = workers.start(
        build_config(outbox.database, target, delivery=delivery), outbox.database.uri(), handler=PYTHON_HANDLER
    )
    report = worker.wait_state("Stopped", "AttemptsExhausted")
    assert "gave up after 2 attempts at " in report.message
    assert outbox.handled() == ids[:699]
    assert report.handled == 699
    outbox.connection.execute("ALTER TABLE handled DROP CONSTRAINT handled_message_id_check")
    worker.terminate()
    workers.start(
        build_config(outbox.database, target, delivery=delivery), outbox.database.uri(), handler=PYTHON_HANDLER
    )
    outbox.wait_handled(ids)


ENDING = {
    "connection.commit()": "connection.commit()",
    "connection.rollback()": "connection.rollback()",
    "connection.close()": "connection.close()",
    "connection.autocommit": "connection.autocommit = True",
    "`with connection:`": "exec('with connection: pass')",
    "SQL COMMIT": "connection.execute('SELECT 1; commit; begin')",
    "SQL ROLLBACK": "connection.execute('/* x; */ -- y\\n rollback')",
    "SQL END": "connection.cursor().execute('END')",
    "SQL ABORT": "exec('try:\\n connection.execute(\"abort\")\\nexcept Exception: pass')",
}
"""What the status names, and the line that does it. The last is swallowed by the handler."""


def test_handlers_that_end_the_transaction_are_stopped_and_named(outbox, workers):
    ids = outbox.produce(2)
    config = build_config(outbox.database, PYTHON_TARGET, delivery={"retry": {"maxAttempts": 1}})
    home = workers.prepare(config, outbox.database.uri(), handler=PYTHON_HANDLER + "    connection.commit()\n")
    worker = workers.launch(home)
    for named, line in ENDING.items():
        (home / "handler/orders.py").write_text(f"{PYTHON_HANDLER}\n    {line}\n")
        report = worker.wait_for(named, lambda r, named=named: r.state == "Stopped" and f"called {named}" in r.message)
        assert "HandlerEndedTransaction" in report.message
        assert report.last_error is not None
        assert "orders.py" in report.last_error
        assert outbox.handled() == []
        assert outbox.stored() == "0:0"
    (home / "handler/orders.py").write_text(PYTHON_HANDLER)
    outbox.wait_handled(ids)


def test_a_handler_that_ends_the_transaction_in_disguise_is_noticed_afterwards(outbox, workers):
    outbox.produce(2)
    config = build_config(outbox.database, PYTHON_TARGET, delivery={"retry": {"maxAttempts": 1}})
    handler = f"{PYTHON_HANDLER}\n    connection.pgconn.exec_(b'commit; begin')\n"
    worker = workers.start(config, outbox.database.uri(), handler=handler)
    assert "HandlerEndedTransaction" in worker.wait_state("Stopped").message
    assert outbox.stored() == "0:0"


HARMLESS = """
def handle(batch, connection):
    for message in batch:
        with connection.transaction():
            connection.execute("INSERT INTO handled (message_id) VALUES (%s)", (message.message_id,))
    try:
        with connection.transaction():
            connection.execute("SELECT 1 / 0")
    except Exception:
        pass
    connection.execute("SAVEPOINT mine; ROLLBACK TO SAVEPOINT mine; SELECT 'COMMIT; END'")
    connection.execute("SELECT CASE WHEN true THEN 'rollback;' END -- commit")
    with connection.pipeline():
        connection.execute("SELECT 1")
"""


def test_savepoints_pipelines_and_words_in_quotes_are_free(outbox, workers):
    ids = outbox.produce(5)
    worker = workers.start(build_config(outbox.database, PYTHON_TARGET), outbox.database.uri(), handler=HARMLESS)
    outbox.wait_handled(ids)
    assert worker.report().last_error is None


SWALLOWING = """
def handle(batch, connection):
    try:
        connection.execute("SELECT 1 / 0")
    except Exception:
        pass
"""


def test_a_handler_that_swallows_a_database_error(outbox, workers):
    outbox.produce(2)
    config = build_config(outbox.database, PYTHON_TARGET, delivery={"retry": {"maxAttempts": 1}})
    worker = workers.start(config, outbox.database.uri(), handler=SWALLOWING)
    assert "swallowed a database error" in worker.wait_state("Stopped").message
    assert outbox.stored() == "0:0"


TOO_SLOW = {
    "asleep": "import time; time.sleep(60)",
    "waiting": "connection.execute('SELECT pg_sleep(60)')",
    "computing": "exec('while True: pass')",
}


def test_handlers_that_run_too_long_are_stopped(outbox, workers):
    ids = outbox.produce(2)
    delivery = {"timeout": "1s", "retry": {"maxAttempts": 1}}
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler="")
    worker = workers.launch(home)
    for name, line in TOO_SLOW.items():
        (home / "handler/orders.py").write_text(f"{PYTHON_HANDLER}\n    {line}  # {name}\n")
        report = worker.wait_for(name, lambda r, name=name: r.state == "Stopped" and f"# {name}" in str(r.last_error))
        assert "HandlerTimeout" in report.message
        assert outbox.handled() == []
    (home / "handler/orders.py").write_text(PYTHON_HANDLER)
    outbox.wait_handled(ids)


def test_a_statement_that_fails_shows_where_and_no_payload(outbox, workers):
    outbox.produce(3)
    outbox.connection.execute("ALTER TABLE handled ADD CHECK (total < 0) NOT VALID")
    worker = workers.start(
        build_config(outbox.database, SQL_TARGET, delivery={"retry": {"maxAttempts": 2}}), outbox.database.uri()
    )
    report = worker.wait_state("Stopped")
    assert "StatementFailed" in report.message
    assert "violates check constraint" in report.message
    assert "message 'message-1' of type" in report.message
    assert "Failing row contains" not in worker.log() + report.model_dump_json()
    wrong = {"sql": {"statement": "INSERT INTO handled (message_id) SELECT nothing FROM batch"}}
    other = workers.start(
        build_config(outbox.database, wrong, processor_id="other", delivery={"retry": {"maxAttempts": 1}}),
        outbox.database.uri(),
    )
    assert "at character 41, near 'nothing FROM batch'" in other.wait_state("Stopped").message
    assert outbox.stored() == "0:0"


def test_a_statement_that_is_two(outbox, workers):
    wrong = {"sql": {"statement": "DELETE FROM handled; SELECT 1"}}
    worker = workers.start(build_config(outbox.database, wrong), outbox.database.uri())
    assert "holds 2 statements" in worker.wait_state("Unavailable", "InvalidConfiguration").message
    assert worker.get("/livez")[0] == 200


def test_a_table_of_the_target_that_is_missing_and_made(outbox, workers):
    ids = outbox.produce(3)
    outbox.connection.execute("ALTER TABLE handled RENAME TO away")
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    worker.wait_state("Retrying", "StatementFailed")
    outbox.connection.execute("ALTER TABLE away RENAME TO handled")
    outbox.wait_handled(ids)
    assert worker.wait_state("Active").attempt == 0


def test_a_configuration_that_cannot_be_read(outbox, workers):
    home = workers.prepare(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    (home / "processor.json").write_text('{"processorId": 5}')
    worker = workers.launch(home)
    assert worker.process.wait(20) == 12
    assert "processorId" in worker.log()


def test_a_killed_session_in_the_middle_of_a_batch(outbox, workers):
    ids = outbox.produce(3)
    slow = {
        "sql": {
            "statement": "INSERT INTO handled (message_id) SELECT message_id FROM batch WHERE pg_sleep(0.5) IS NOT NULL"
        }
    }
    worker = workers.start(
        build_config(outbox.database, slow, delivery={"leaseDuration": "10s"}), outbox.database.uri()
    )

    def kill() -> bool:
        row = outbox.connection.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'WITH batch%' "
            "AND state = 'active' AND pid <> pg_backend_pid()"
        ).fetchone()
        return bool(row != (0,))

    wait_until(kill, "the statement's session is killed")
    outbox.wait_handled(ids)
    assert worker.report().conflicts.count == 0


def test_schema_is_made_by_the_worker_with_manage(empty_database, workers):
    worker = workers.start(build_config(empty_database, SQL_TARGET), empty_database.uri())
    worker.wait_state("Active", "Idle")
    outbox = Outbox(empty_database)
    outbox.wait_handled(outbox.produce(3))
    assert outbox.stored() == outbox.last()


@pytest.mark.parametrize(
    ("body", "state"),
    [
        pytest.param('{"key": "\\u0000"}', "22P05", id="a null character"),
        pytest.param('{"key": "\\ud800"}', "22P02", id="half a character"),
        pytest.param('{"key": 1e999999}', "22003", id="a number that is too large"),
    ],
)
def test_a_row_whose_key_jsonb_does_not_take_is_told_and_corrected(outbox, workers, body, state):
    outbox.connection.execute(
        "CREATE TABLE public.legacy (position bigint GENERATED ALWAYS AS IDENTITY, transaction_id xid8 NOT NULL "
        "DEFAULT pg_current_xact_id(), id text, kind text DEFAULT 't', body json); "
        "CREATE INDEX ON public.legacy (transaction_id, position)"
    )
    for number, text in enumerate(('{"key": "1"}', body, '{"key": "1"}'), 1):
        outbox.connection.execute("INSERT INTO public.legacy (id, body) VALUES (%s, %s)", (f"m-{number}", text))
    columns = {"messageId": "id", "messageType": "kind", "data": "body"}
    config = build_config(
        outbox.database, {"sql": {"statement": "INSERT INTO handled (message_id) SELECT message_id FROM batch"}},
        source={"table": {"schemaName": "public", "name": "legacy", "columns": columns}},
        delivery={"mode": "Partitioned", "partitions": {"count": 2, "key": {"data": ["key"]}}},
    )  # fmt: skip
    worker = workers.start(config, outbox.database.uri())
    report = worker.wait_state("Retrying", "StatementFailed")
    assert f"({state}): if source.table maps the table, its key is read from JSON" in report.message
    assert report.attempt == 0
    outbox.connection.execute("UPDATE public.legacy SET body = '{\"key\": \"2\"}' WHERE id = 'm-2'")
    wait_until(lambda: outbox.count() == 3, "all are handled")
    assert sorted(outbox.handled()) == ["m-1", "m-2", "m-3"]
