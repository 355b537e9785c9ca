"""`outbox run`: one processor in the foreground, from the same manifest that a cluster would get."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from outbox_cli.main import main
from tests.integration.cli.conftest import PROGRAM, Cli, drain
from tests.support.servers.postgres import wait_until
from tests.support.worker import FAST, GATED_HANDLER, PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, Outbox

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def outbox(database):
    return Outbox(database)


@pytest.fixture
def run(tmp_path):
    """Starts `outbox run` and ends what is left of it."""
    started = []

    def start(*arguments, **variables):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with (tmp_path / "out").open("ab") as out, (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [PROGRAM, "run", *map(str, arguments)],
                stdout=out,
                stderr=log,
                env=clean | {"POD_NAME": "laptop"} | variables,
                cwd=tmp_path,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def manifest(directory, target, *, name="orders", namespace="shop", extra=(), **spec):
    """Write a manifest as a person would apply it."""
    body = {
        "apiVersion": "outbox-operator.dev/v1alpha1",
        "kind": "OutboxProcessor",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "source": {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"},
            "delivery": dict(FAST),
            "target": target,
        }
        | spec,
    }
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump_all([*extra, body]))
    return file


def test_several_that_share_a_process_run_in_one(outbox, run, tmp_path, database):
    outbox.connection.execute("CREATE TABLE mails (message_id text)")
    mails = {"sql": {"statement": "INSERT INTO mails SELECT message_id FROM batch"}}
    queue = {"rabbitmq": {"connection": {"secretRef": {"name": "mq"}}, "exchange": "", "routingKey": "shared-by-run"}}
    targets = {"orders": SQL_TARGET, "mails": mails, "queued": queue}
    files = [manifest(tmp_path, target, name=name, worker={"shared": "small"}) for name, target in targets.items()]
    (tmp_path / "targets/mq").mkdir(parents=True)
    (tmp_path / "targets/mq/uri").write_text("amqp://guest:guest@127.0.0.1:1/")
    arguments = [word for file in files for word in ("-f", file)]
    process = run(*arguments, "--connection", database.files().directory, "--target-connection", tmp_path / "targets")
    ids = outbox.produce(20)
    outbox.wait_handled(ids)
    log = tmp_path / "log"
    wait_until(lambda: "127.0.0.1:1" in log.read_text(), "the broker that is not there is named")
    wait_until(lambda: outbox.connection.execute("SELECT count(*) FROM mails").fetchone() == (20,), "all are there")
    handled = outbox.connection.execute("SELECT message_id FROM mails").fetchall()
    assert [each for (each,) in handled] == ids
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert outbox.connection.execute("SELECT DISTINCT token FROM outbox.processor_leases").fetchall() == [(None,)]


@pytest.mark.parametrize(
    ("groups", "names", "namespaces"),
    [
        pytest.param(("", ""), ("orders", "mails"), ("shop", "shop"), id="none says so"),
        pytest.param(("small", "other"), ("orders", "mails"), ("shop", "shop"), id="two groups"),
        pytest.param(("small", "small"), ("orders", "mails"), ("shop", "bank"), id="of two namespaces"),
        pytest.param(("small", "small"), ("orders", "orders"), ("shop", "shop"), id="the same one twice"),
    ],
)
def test_several_that_do_not_share_are_refused(run, tmp_path, groups, names, namespaces):
    files: list[Path] = []
    for group, name, namespace in zip(groups, names, namespaces, strict=True):
        worker = {"worker": {"shared": group}} if group else {}
        (place := tmp_path / str(len(files))).mkdir()
        files.append(manifest(place, SQL_TARGET, name=name, namespace=namespace, **worker))
    process = run("-f", files[0], "-f", files[1], "--connection", tmp_path)
    assert process.wait(30) != 0
    assert "the files hold 2 processors: give one, or several of one namespace" in (tmp_path / "log").read_text()


def test_it_handles_and_drains_on_ctrl_c(outbox, run, tmp_path, database):
    file = manifest(tmp_path, SQL_TARGET)
    process = run("-f", file, "--connection", database.files().directory)
    ids = outbox.produce(20)
    outbox.wait_handled(ids)
    (claim,) = outbox.connection.execute("SELECT cluster, namespace, name FROM outbox.processor_claims").fetchall()
    assert claim[0].startswith("local/")
    assert claim[1:] == ("shop", "orders")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert outbox.stored() == outbox.last()
    live = outbox.connection.execute("SELECT expires_at > now() FROM outbox.processor_leases").fetchone()
    assert live == (False,)
    assert "Ctrl-C finishes or rolls back" in (tmp_path / "log").read_text()


def test_another_schema_than_the_manifests_is_refused(cli, tmp_path):
    done = cli.process("run", "-f", str(manifest(tmp_path, SQL_TARGET)), "--schema", "staging")
    assert (done.returncode, done.stderr) == (2, "outbox: --schema staging is not the manifest's schemaName outbox\n")


def test_its_port_is_reached_from_this_machine_only(outbox, run, tmp_path, database):
    run("-f", manifest(tmp_path, SQL_TARGET), "--connection", database.files().directory)
    wait_until(lambda: '"port"' in (tmp_path / "log").read_text(), "the log names the port")
    (port,) = map(int, re.findall(r'"port": ?(\d+)', (tmp_path / "log").read_text()))
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):  # the whole of 127.0.0.0/8 is this machine
        socket.create_connection(("127.0.0.2", port), 5)


def test_started_again_it_is_the_same_resource_and_goes_on(outbox, run, tmp_path, database):
    file, where = manifest(tmp_path, SQL_TARGET), ("--connection", database.files().directory)
    first = outbox.produce(5)
    process = run("-f", file, *where)
    outbox.wait_handled(first)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    more = outbox.produce(5, start=5)
    run("-f", file, *where)
    outbox.wait_handled(first + more)


def test_ctrl_c_in_the_middle_of_a_batch_finishes_it(outbox, run, tmp_path, database):
    handlers = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "handlers"},
        "data": {"orders.py": GATED_HANDLER},
    }
    file = manifest(tmp_path, PYTHON_TARGET, extra=[handlers], delivery=FAST | {"leaseDuration": "10s"})
    ids = outbox.produce(3)
    gate = HandlerGate(tmp_path)
    gate.close()
    process = run("-f", file, "--connection", database.files().directory)
    gate.wait_entered()
    process.send_signal(signal.SIGINT)
    gate.open()
    assert process.wait(30) == 0
    assert outbox.handled() == ids
    assert outbox.stored() == outbox.last()


class Supervised:
    """`outbox run` as a supervisor keeps it: started again whenever it is killed."""

    def __init__(self, start, outbox):
        self.start, self.outbox, self.crashes = start, outbox, 0
        self.process = start()

    def until(self, condition, what, most):
        """Each process has all the time of a wait: it begins when the lease of the one before is over."""
        while not condition():
            wait_until(lambda: self.process.poll() is not None or condition(), what)
            if self.process.poll() is not None:
                assert self.process.returncode == -signal.SIGKILL
                self.crashes += 1
                assert self.crashes <= most
                self.process = self.start()


def deadly(message):
    """Its process is killed, as for its memory, where the batch has this message."""
    return f"{PYTHON_HANDLER}    if any(m.message_id == {message!r} for m in batch):\n        os.kill(os.getpid(), 9)\n"


def test_a_message_that_kills_its_process_is_given_up_and_the_rest_goes_on(outbox, run, tmp_path, database):
    """Deaths are counted over starts of the same text."""
    folder = tmp_path / "code"
    folder.mkdir()
    handler = folder / "orders.py"
    handler.write_text(deadly("message-3"))
    delivery = FAST | {"batchSize": 2, "whenExhausted": "DeadLetter"}
    file = manifest(tmp_path, PYTHON_TARGET, delivery=delivery)
    ids = outbox.produce(6)
    arguments = ("-f", file, "--connection", database.files().directory, "--handler", folder)
    kept = Supervised(lambda: run(*arguments), outbox)
    kept.until(lambda: outbox.handled() == [each for each in ids if each != "message-3"], "the rest is handled", 4)
    letters = outbox.connection.execute("SELECT message_id, error_class FROM outbox.dead_letters").fetchall()
    assert letters == [("message-3", "ProcessKilled")]
    assert kept.crashes == 4, "two until the place is suspected, two of the message alone"


def test_the_database_is_named_by_the_environment(outbox, run, tmp_path, database):
    server = database.server
    service = tmp_path / "services.conf"
    service.write_text(f"[shop]\nhost=127.0.0.1\nport={server.port}\ndbname={database.name}\nuser=postgres\n")
    variables = {"PGSERVICEFILE": str(service), "PGSERVICE": "shop"}
    run("-f", manifest(tmp_path, SQL_TARGET), **variables)
    ids = outbox.produce(3)
    outbox.wait_handled(ids)
    done = Cli(tmp_path).process("status", "--output", "json", where=(), **variables)
    assert json.loads(done.stdout)[0]["pod"] == "laptop"


def test_the_log_target_writes_to_stdout(outbox, run, tmp_path, database):
    (tmp_path / "dsn").write_text(database.uri())
    run("-f", manifest(tmp_path, {"log": {}}), "--dsn-file", tmp_path / "dsn")
    outbox.produce(2)
    wait_until(lambda: len((tmp_path / "out").read_text().splitlines()) == 2, "two lines")
    first = json.loads((tmp_path / "out").read_text().splitlines()[0])
    assert first["messageId"] == "message-1"


def test_the_examples_code_runs_from_its_two_files(outbox, run, tmp_path, database):
    outbox.connection.execute((ROOT / "examples" / "orders.sql").read_text())
    folder = ROOT / "examples" / "orders-loyalty"
    connections = tmp_path / "connections"
    connections.mkdir()
    (connections / "source").symlink_to(database.files().directory)
    process = run("-f", folder / "processor.yaml", "-f", folder / "handler.yaml", "--connections", connections)
    outbox.connection.execute(
        "INSERT INTO outbox.messages (message_type, data) VALUES ('OrderPlaced', "
        """'{"orderKey": "o-1", "sequence": 1, "cents": 1250, "customer": "ann"}')"""
    )
    points = "SELECT customer, points FROM loyalty.points"
    wait_until(lambda: outbox.connection.execute(points).fetchall() == [("ann", 12)], "the points are given")
    assert process.poll() is None, "it goes on until it is asked to stop"


def test_it_keeps_out_of_a_processor_that_a_cluster_owns(outbox, run, tmp_path, database):
    outbox.connection.execute("SELECT outbox.claim_processor('orders', 'production', 'shop', 'orders', 'uid-1')")
    process = run("-f", manifest(tmp_path, SQL_TARGET), "--connection", database.files().directory)
    outbox.produce(3)
    wait_until(lambda: "production/shop/orders" in (tmp_path / "log").read_text(), "the log names the owner")
    assert process.poll() is None
    assert outbox.handled() == []


@pytest.mark.parametrize(
    ("target", "spec", "status", "said"),
    [
        pytest.param({"sql": {}}, {}, 1, "spec.target.sql.statement: Required value: set it", id="a field is missing"),
        pytest.param({"log": {}, **SQL_TARGET}, {}, 1, "set exactly one target", id="two targets"),
        pytest.param(None, {}, 1, "set one of target.sql", id="no target"),
        pytest.param({"log": {}}, {"suspend": True}, 3, "spec.suspend is true", id="suspended"),
        pytest.param(SQL_TARGET, {"engine": "Spark", "spark": {}}, 3, "engine Spark", id="another engine"),
        pytest.param({"log": {}}, {"speed": 9}, 1, 'unknown field "spec.speed": it can have', id="an unknown field"),
        pytest.param({"log": {}}, {"startFrom": {"type": "Position"}}, 1, "position goes with", id="half a start"),
        pytest.param({"log": {}}, {"delivery": {"leaseDuration": "1s"}}, 1, "leaseDuration must be", id="lease"),
        pytest.param(PYTHON_TARGET, {}, 1, "ConfigMap handlers is in none of the files", id="no code"),
        pytest.param(
            {"rabbitmq": {"connection": {"secretRef": {"name": "b"}}}}, {}, 2, "which target?", id="no broker"
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_says_what_to_change(database, tmp_path, target, spec, status, said):
    file = manifest(tmp_path, target, **spec)
    done = Cli(database.files().directory).run("run", "-f", str(file))
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_database_it_asks_for_one(tmp_path):
    done = Cli(tmp_path).process("run", "-f", str(manifest(tmp_path, {"log": {}})), where=())
    assert done.returncode == 2
    assert "which database?" in done.stderr


def test_without_a_folder_for_temporary_files_it_asks_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert main(["run", "-f", str(manifest(tmp_path, {"log": {}})), "--connection", str(tmp_path)]) == 1
    assert "No such file or directory): name in TMPDIR one that this user may write" in capsys.readouterr().err


def test_as_a_module_and_as_a_kubectl_plugin():
    module = subprocess.run([sys.executable, "-m", "outbox_cli", "--help"], capture_output=True, text=True, check=True)
    plugin = subprocess.run(
        [PROGRAM.with_name("kubectl-outbox"), "status", "--help"], capture_output=True, text=True, check=True
    )
    assert module.stdout.startswith("usage: outbox ")
    assert plugin.stdout.startswith("usage: kubectl outbox status ")


def test_at_a_terminal_the_log_is_for_people(outbox, tmp_path, database):
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [PROGRAM, "run", "-f", manifest(tmp_path, SQL_TARGET), "--connection", database.files().directory],
        stdout=subprocess.DEVNULL,
        stderr=inner,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"POD_NAME": "laptop"},
    )
    os.close(inner)
    try:
        outbox.wait_handled(outbox.produce(1))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        shown = drain(outer)
    finally:
        process.kill()
        process.wait()
        os.close(outer)
    assert re.search(r"\d\d:\d\d:\d\d info +state state=Active", shown)
    assert "claim vacated" in shown
