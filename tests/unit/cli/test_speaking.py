"""How commands speak: cells, spans of time, progress, exit statuses."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from typing_extensions import override

from outbox_cli.console import Column, format_cell, format_counts, format_table
from outbox_cli.errors import CommandError, Exit, RefusedError, UsageError
from outbox_cli.main import main
from outbox_cli.progress import EVERY_SECONDS, Progress, format_progress
from outbox_core.span import format_age


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), ("", "-"), ([], "-"), (True, "yes"), (False, "no"), (0, "0"), (0.04, "0.0s"), ("a", "a"),
        (["a", "b"], "a, b"),
        ({"a": 1}, "{'a': 1}"), (datetime(2026, 11, 21, 10, 0, tzinfo=UTC), "2026-11-21 10:00:00Z"),
    ],
)  # fmt: skip
def test_cells(value, text):
    assert format_cell(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0s"), (9.94, "9.9s"), (59.9, "59s"), (200, "3m20s"), (7500, "2h05m"), (90_000, "1d01h")],
)
def test_spans(seconds, text):
    assert format_age(seconds) == text


def test_a_table_is_as_wide_as_it_needs():
    lines = list(format_table([{"a": 1, "b": None}, {"a": 12345, "b": "x"}], [Column("A", "a"), Column("BB", "b")]))
    assert lines == ["A       BB", "1       -", "12345   x"]


def test_counts_name_what_has_no_type():
    assert format_counts({"OrderPlaced": 2, "": 1}) == "2 OrderPlaced, 1 without type"


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_its_line_back():
    terminal = Terminal()
    with Progress("migrations", 4, terminal, clock=iter(range(100)).__next__) as progress:
        progress.reach(2)
        assert terminal.getvalue() == "\rmigrations [###############...............] 2/4"
    assert terminal.getvalue().endswith("\r")


def test_a_log_gets_a_line_now_and_then():
    log, now = io.StringIO(), [0.0]
    with Progress("rows", None, log, clock=lambda: now[0]) as progress:
        progress.reach(1)
        now[0] = EVERY_SECONDS
        progress.reach(1234)
        progress.reach(1300)
    assert log.getvalue() == "rows: 1,234 …\n"


def test_a_total_may_be_known_late():
    terminal = Terminal()
    with Progress("rows", None, terminal, clock=iter(range(100)).__next__) as progress:
        progress.reach(5, 10)
        progress.reach(12, 10)
    assert "5/10" in terminal.getvalue()
    assert "12/12" in terminal.getvalue()


def test_progress_of_nothing_is_whole():
    assert format_progress("rows", 0, 0, bar=True).count("#") == 30
    assert format_progress("rows", 3, 10, bar=False) == "rows: 3 of 10"


def test_exit_statuses_are_those_of_the_page():
    assert [status.value for status in Exit] == [0, 1, 2, 3, 4, 130]
    assert (CommandError.status, UsageError.status, RefusedError.status) == (1, 2, 3)


def test_a_wrong_line_is_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rewind", "orders", "--connection", "x"])
    assert ended.value.code == Exit.USAGE
    assert "--to-beginning" in capsys.readouterr().err


def test_a_password_is_never_an_argument(capsys):
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert "password" in capsys.readouterr().out
    for option in ("--password", "--uri", "--dsn"):
        with pytest.raises(SystemExit) as ended:
            main(["status", option, "secret"])
        assert ended.value.code == Exit.USAGE
