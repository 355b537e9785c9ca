"""What a person reads of a real processor: checkpoints, connections that are not there, and the log while it works."""

from __future__ import annotations

import re
import signal

import pytest

from outbox_core.progress.checkpoint import MAX_POSITION
from outbox_worker.observe.status import ACTIVITY_SECONDS
from tests.integration.cli.conftest import Cli
from tests.integration.cli.test_running import manifest, outbox, run
from tests.support.servers.postgres import wait_until
from tests.support.worker import SQL_TARGET

__all__ = ["outbox", "run"]


@pytest.fixture
def cli(database):
    return Cli(database.files().directory)


def test_a_checkpoint_behind_all_of_a_transaction_id_is_a_word_that_can_be_written_back(cli, outbox):
    outbox.produce(1)
    outbox.connection.execute(
        "INSERT INTO outbox.processor_checkpoints (processor_id, partition, last_processed_transaction_id, "
        "last_processed_position) VALUES ('orders', 0, '5929', %s)",
        [MAX_POSITION],
    )
    for command in ("status", "lag"):
        shown = cli.run(command).stdout
        assert "5929:end" in shown
        assert str(MAX_POSITION) not in shown
    (record,) = cli.json("status")
    assert record["checkpoint"] == f"5929:{MAX_POSITION}", "a program reads the pair"
    told = cli.run("rewind", "orders", "--to", "5929:end", "--dry-run")
    assert "is not a checkpoint" not in told.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--connection", "there is no such folder; name one that holds the files of a connection"),
        ("--dsn-file", "there is no file"),
    ],
)
def test_a_connection_that_is_not_there_is_said(tmp_path, option, said):
    done = Cli(tmp_path).process("status", where=(option, str(tmp_path / "absent")))
    assert done.returncode == 1
    assert said in done.stderr
    assert str(tmp_path / "absent") in done.stderr


def test_an_empty_folder_says_which_files_it_needs(tmp_path):
    done = Cli(tmp_path).process("status", where=("--connection", str(tmp_path)))
    assert "put postgresql://user:password@host:5432/database into `uri`" in done.stderr


def test_the_log_says_every_ten_seconds_and_at_the_end_what_was_handled(outbox, run, tmp_path, database):
    process = run(
        "-f", manifest(tmp_path, SQL_TARGET), "--connection", database.files().directory, OUTBOX_LOG_FORMAT="text"
    )
    log = tmp_path / "log"

    def lines():
        return re.findall(r" handled messages=(\d+) perSecond=([\d.]+) checkpoint=(\d+:\d+)", log.read_text())

    handled = outbox.produce(5)
    wait_until(lambda: len(lines()) == 1, "the first line", seconds=ACTIVITY_SECONDS + 10)
    more = outbox.produce(2, start=5)
    outbox.wait_handled(handled + more)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert [int(messages) for messages, _, _ in lines()] == [5, 2]
    assert lines()[-1][2] == str(outbox.stored())
