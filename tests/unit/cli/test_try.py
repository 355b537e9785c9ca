"""What `outbox try` decides: its ledger, against the demo's over random histories; its folder; its lines to paste."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from outbox_cli.errors import CommandError
from outbox_cli.try_out import ledger
from outbox_cli.try_out.cache import sweep
from outbox_cli.try_out.ledger import Message, Order, Reasons, format_accounts
from outbox_cli.try_out.place import Place, take_place
from outbox_cli.try_out.pokes import build_pokes
from outbox_cli.try_out.processors import LEASE, build_processors
from outbox_cli.try_out.screen import Rates, Screen, build_table
from outbox_core.config import ProcessorConfig
from tests.tools.ledger import account
from tests.tools.ledger.commitlog import Committed

if TYPE_CHECKING:
    from collections.abc import Iterator


def make_messages(random: Random, count: int = 60) -> list[Committed]:
    """Keys of one producer each, so that both ledgers ask for the same order."""
    sequences: dict[str, int] = {}
    made = []
    for number in range(count):
        key = f"order-{random.randrange(6)}"
        sequences[key] = sequences.get(key, 0) + 1
        made.append(Committed(f"m{number}", (100 + number // 3, number), key, sequences[key], 5, 0, 0))
    return made


def spoil(random: Random, committed: list[Committed]) -> list[Committed]:
    """Lose, double, exchange and invent, at random."""
    handled = [m for m in committed if random.random() > 0.05]
    handled += [m for m in handled if random.random() < 0.05]
    for _ in range(random.randrange(4)):
        one, other = random.randrange(len(handled)), random.randrange(len(handled))
        handled[one], handled[other] = handled[other], handled[one]
    invented = [replace(committed[0], message_id=f"undone{n}", key="nothing") for n in range(random.randrange(3))]
    return handled + invented


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("order", [Order.ALL, Order.KEY, Order.NONE])
def test_ledger_says_what_the_demos_ledger_says(seed, order):
    random = Random(seed)
    committed = make_messages(random)
    handled = spoil(random, committed) if seed else committed
    wanted = account.compare(
        "x", committed, [account.Handled(m.message_id, m.key, m.sequence) for m in handled],
        order={Order.ALL: account.Order.TOTAL, Order.KEY: account.Order.KEY, Order.NONE: account.Order.NONE}[order],
    )  # fmt: skip
    found = ledger.compare(
        "x", [Message(m.message_id, m.key, m.pair) for m in committed], [m.message_id for m in handled], order=order,
        undone={f"undone{n}" for n in range(3)},
    )  # fmt: skip
    counted = [found.counts[kind] for kind in ("lost", "duplicated", "out of order", "invented")]
    assert [found.produced, found.handled, *counted] == [
        wanted.produced, wanted.handled, wanted.lost, wanted.duplicated, wanted.out_of_order or 0, wanted.foreign,
    ]  # fmt: skip
    assert ("any order" in format_accounts([found])[1]) == (wanted.out_of_order is None)
    assert found.is_exact == wanted.is_exact()


PRODUCED = [Message(f"m{n}", "k", (10 + n, n)) for n in range(10)]


@pytest.mark.parametrize(
    ("lines", "reasons", "said"),
    [
        pytest.param("0123 789", Reasons((((13, 3), (16, 6)),)), {"passed over": 3}, id="passed over by a decision"),
        pytest.param("012 6789", Reasons((((13, 3), (16, 6)),)), {"lost": 1, "passed over": 2}, id="and one lost"),
        pytest.param("0123456456789", Reasons((((16, 6), (13, 3)),)), {"repeated": 3}, id="repeated by a decision"),
        pytest.param("01234563456789", Reasons((((16, 6), (13, 3)),)), {"repeated": 3, "duplicated": 1}, id="and one"),
        pytest.param("01234", Reasons(stopped="code 2"), {"waiting": 5}, id="waits behind an open conflict"),
        pytest.param("01234", Reasons(), {"lost": 5}, id="nothing says why"),
        pytest.param("0123 789", Reasons((None,)), {"passed over": 3}, id="a decision about a cursor without pairs"),
    ],
)
def test_what_a_person_did_explains_what_it_causes_and_no_more(lines, reasons, said):
    found = ledger.compare("x", PRODUCED, [f"m{n}" for n in lines if n != " "], order=Order.ALL, reasons=reasons)
    assert {kind: number for kind, number in found.counts.items() if number} == said
    assert found.is_exact == (not said.keys() & {"lost", "duplicated"})


def test_what_the_reader_deleted_is_no_fault_and_what_was_rolled_back_is():
    found = ledger.compare("x", PRODUCED[:1], ["m0", "gone", "undone"], order=Order.ALL, undone={"undone"})
    assert (found.counts["unknown"], found.counts["invented"], found.is_exact) == (1, 1, False)


def test_processors_are_configurations_of_the_worker():
    for processor in build_processors():
        resource = {"cluster": "try", "namespace": "shop", "name": processor.processor_id, "uid": "u"}
        config = ProcessorConfig.model_validate(
            {"resource": resource, "generation": 1, "processorId": processor.processor_id, **processor.spec}
        )
        assert config.delivery.mode == processor.mode


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for that of a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="try-") as folder:
        Path(folder).chmod(0o711)  # root's server is another user
        yield Path(folder)


def test_folder_of_a_killed_run_is_emptied_and_one_of_something_else_refused(short: Path):
    place, swept = take_place(short / "run")
    place.furnish()
    os.close(place.lock)
    again, swept_again = take_place(short / "run")
    assert (swept, swept_again) == (False, True)
    assert [path.name for path in again.folder.iterdir()] == [".outbox-try"]
    os.close(again.lock)
    (short / "letters").mkdir()
    (short / "letters" / "mine.txt").touch()
    with pytest.raises(CommandError, match=r"has files that are not of `outbox try`: name another folder"):
        take_place(short / "letters")
    assert (short / "letters" / "mine.txt").exists()


@pytest.mark.parametrize("name", ["lock", ".outbox-try"])
def test_folder_with_a_file_that_has_the_name_of_ours_keeps_its_files(short: Path, name: str):
    (short / "mine" / "precious").mkdir(parents=True)
    for path in (name, "b", "precious/a"):
        (short / "mine" / path).write_text("mine")
    with pytest.raises(CommandError, match=r"has files that are not of `outbox try`: name another folder"):
        take_place(short / "mine")
    assert sorted(path.name for path in (short / "mine").rglob("*")) == sorted([name, "a", "b", "precious"])


def test_number_of_an_old_server_that_is_another_program_now_is_not_signalled(short: Path):
    place, _ = take_place(short / "run")
    place.furnish()
    os.close(place.lock)
    with subprocess.Popen(["sleep", "60"]) as other:
        (place.data / "postmaster.pid").write_text(f"{other.pid}\n{place.data}\n")
        again, swept = take_place(short / "run")
        os.close(again.lock)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        other.kill()
    assert swept


def test_folder_of_a_live_run_is_refused_and_says_which(short: Path):
    place, _ = take_place(short / "run")
    other = os.open(short / "run" / ".outbox-try", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(CommandError, match=rf"another `outbox try` runs in .* \(pid {os.getpid()}\): end it \(kill"):
        take_place(short / "run")
    os.close(other)
    os.close(place.lock)


def test_kept_folder_is_never_emptied(short: Path):
    place, _ = take_place(short / "run")
    place.mark_kept()
    os.close(place.lock)
    with pytest.raises(CommandError, match=r"kept \(--keep\): remove it \(rm -r "):
        take_place(short / "run")


@pytest.mark.parametrize("kind", ["a link", "a file", "too long"])
def test_folder_that_cannot_be_one_is_refused_with_the_remedy(short: Path, kind: str):
    path = short / "run"
    if kind == "a link":
        path.symlink_to(short, target_is_directory=True)
    elif kind == "a file":
        path.touch()
    else:
        path = short / ("x" * 100)
    with pytest.raises(CommandError, match=r"--folder DIR"):
        take_place(path)


def test_disk_without_room_is_refused_with_the_remedy(short: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=12_000_000))
    with pytest.raises(
        CommandError, match=r"has 12 MB left, and the database needs 150 MB: make room, or name a folder"
    ):
        take_place(short / "run")
    assert list(short.iterdir()) == []


def test_folder_without_a_parent_is_refused_and_nothing_is_made(short: Path):
    with pytest.raises(CommandError, match=r"/a is not there: make it \(mkdir -p .*/a\), or name another folder with"):
        take_place(short / "a" / "run")
    assert list(short.iterdir()) == []


def test_machine_without_a_folder_for_temporary_files_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/1/none"])
    with pytest.raises(CommandError, match=r"no folder for temporary files may be written .* --folder DIR"):
        take_place(None)


def test_folder_that_roots_server_cannot_reach_is_refused(short: Path):
    (short / "closed" / "inside").mkdir(parents=True)
    (short / "closed").chmod(0o700)
    with pytest.raises(CommandError, match=r"is below .*/closed, which the user nobody may not enter"):
        take_place(short / "closed" / "inside" / "run")
    assert list((short / "closed" / "inside").iterdir()) == []


def test_copy_that_a_live_run_is_making_is_no_rubbish(tmp_path: Path):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    for pid in (os.getpid(), dead.pid):
        (tmp_path / f".tmp-{pid}" / "base").mkdir(parents=True)
    sweep(tmp_path, ".tmp-")
    assert [path.name for path in tmp_path.iterdir()] == [f".tmp-{os.getpid()}"]


def test_lines_to_paste_are_one_command_each(tmp_path: Path):
    place = Place(tmp_path / "a folder", -1)
    pasted = [line.strip() for line in build_pokes(place, 4711) if line.startswith("    ")]
    assert "kill -9 4711" in pasted
    for line in pasted:
        program, *arguments = shlex.split(line)
        assert program in {"kill", str(place.folder / "psql"), str(place.folder / "outbox")}
        assert arguments
        assert "$" not in line.replace("$$", "")


def test_lease_that_is_told_is_the_lease(tmp_path: Path):
    assert any(f"lease of {LEASE[:-1]} s" in line for line in build_pokes(Place(tmp_path, -1), 1))


def test_rate_is_over_the_last_seconds():
    rates = Rates()
    assert [round(rates.note("x", at, 10 * at)) for at in range(9)][1:] == [10] * 8
    assert round(rates.note("x", 9.0, 80)) == 8


def test_table_is_aligned():
    head, row = build_table([("orders-totals-0", "1", "Active", "yes, epoch 1", "7:1", "5", "1", "0 (0.0 s)", "0")])
    assert head.index("OWNER") == row.index("yes")


def test_table_leaves_columns_out_until_it_fits():
    rows = [
        ("orders-totals-0", "40711", "Blocked: CheckpointAhead", "yes, epoch 12", "59291:52712", "52712", "120",
         "1271 (12.5 s)", "1"),
        ("orders-loyalty-0", "40712", "Active", "partitions 0,1", "0:17 +1", "52712", "120", "0 (0.0 s)", "0"),
    ]  # fmt: skip
    assert len(build_table(rows)[0].split()) == 9
    narrow = build_table(rows, 79)
    assert narrow[0].split() == ["WORKER", "PHASE", "HANDLED", "LAG", "CONFLICTS"]
    assert max(map(len, narrow)) <= 79
    assert [len(build_table(rows, width)[0].split()) for width in (200, 100, 20)] == [9, 7, 5]


def test_highest_position_is_not_shown_to_people(capsys: pytest.CaptureFixture[str]):
    screen = Screen()
    screen.say(f"orders-totals: code 2: the stored checkpoint is 7:{2**63 - 1}, ahead of 5:3")
    screen.draw([f"at 7:{2**63 - 1}"], 0.0, now=True)
    assert capsys.readouterr().out == (
        "orders-totals: code 2: the stored checkpoint is 7:end, ahead of 5:3\nat 7:end\n\n"
    )


@pytest.mark.parametrize("program", ["main", "kubectl"])
def test_both_programs_know_it(program):
    call = f"from outbox_cli.start import {program}; {program}()"
    done = subprocess.run(
        [sys.executable, "-c", call, "try", "--seconds", "abc"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "'abc' is not a number of seconds" in done.stderr) == (2, True), done.stderr


FORKED = """
import os, signal
from outbox_cli.try_out.run import EndedError, Signals

signals = Signals()
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
try:
    os.kill(os.getpid(), signal.SIGINT)
except EndedError:
    assert signals.ended == signal.SIGINT
else:
    raise AssertionError("the run goes on")
"""


def test_a_signal_ends_the_run_and_is_not_told_by_a_process_that_was_forked_a_moment_ago():
    """A terminal sends it to both; the new one would write a traceback onto the screen."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
