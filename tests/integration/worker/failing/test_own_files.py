"""A worker whose own output and files cannot be written does its work, and ends as one that is well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.servers.postgres import free_port
from tests.support.worker import SQL_TARGET, Worker, build_config


@pytest.fixture
def start_without_output(workers):
    """Start a worker whose standard output is closed, as a shell does by `>&-`."""

    def start(config, uri):
        home, port = workers.prepare(config, uri), free_port()
        command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "outbox_worker"]
        files = ["--config", "processor.json", "--connections", "connections", "--termination-log", "termination-log"]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *files, "--port", str(port)], stderr=log, cwd=home, env=os.environ | {"POD_NAME": home.name}
            )
        worker = Worker(home, port, process)
        workers.started.append(worker)
        return worker

    return start


def test_a_termination_message_that_cannot_be_written_fails_no_stop(database, outbox, workers):
    home = workers.prepare(build_config(database, SQL_TARGET), database.uri())
    (home / "termination-log").unlink()
    (home / "termination-log").symlink_to("/dev/full")
    worker = workers.launch(home)
    outbox.wait_handled(outbox.produce(3))
    assert worker.terminate() == 0
    assert "the termination message cannot be written" in worker.log()
    assert "Traceback" not in worker.log()


def test_without_a_standard_output_it_works_and_its_end_is_no_failure(database, outbox, start_without_output):
    worker = start_without_output(build_config(database, SQL_TARGET), database.uri())
    outbox.wait_handled(outbox.produce(3))
    assert worker.terminate() == 0
    assert "Traceback" not in worker.log()


def test_without_a_standard_output_target_log_says_what_is_missing(database, outbox, start_without_output):
    worker = start_without_output(build_config(database, {"log": {}}), database.uri())
    outbox.produce(3)
    report = worker.wait_state("Unavailable", "InvalidConfiguration")
    assert "standard output of this process is closed" in report.message
    assert worker.terminate() == 0
    assert "a fault of the worker itself" not in worker.log()
