"""How commands speak: cells, spans of time, progress, exit statuses."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typing_extensions import override

from outbox_cli.console import EVERY_SECONDS, Console, Format, Progress, format_cell, format_counts, format_progress
from outbox_cli.errors import CommandError, Exit, RefusedError, UsageError
from outbox_cli.main import main
from outbox_core import __version__
from outbox_core.span import format_age

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), ("", "-"), ([], "-"), (True, "yes"), (False, "no"), (0, "0"), (0.04, "0.0s"), ("a", "a"),
        (["a", "b"], "a, b"), ("\x1b[2Jkey\n\x9b", r"\x1b[2Jkey\n\x9b"), (["\x07"], r"\x07"),
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


def test_a_table_is_as_wide_as_it_needs(capsys):
    console = Console(Format.TABLE, assume_yes=False)
    console.show([{"a": 1, "b": None}, {"a": 12345, "b": "x"}], {"A": "a", "BB": "b"}, empty="nothing")
    assert capsys.readouterr().out.splitlines() == ["A      BB", "1      -", "12345  x"]


def test_counts_name_what_has_no_type():
    assert format_counts({"OrderPlaced": 2, "": 1}) == "2 OrderPlaced, 1 without type"


@pytest.mark.parametrize("speak", [Console.say, Console.note])
def test_a_text_keeps_its_lines_and_shows_other_control_characters(capsys, speak):
    speak(Console(Format.TABLE, assume_yes=False), "the key\n\t\x1b[2J")
    assert "".join(capsys.readouterr()) == "the key\n\t\\x1b[2J\n"


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lag", "--cap", "many"], "--cap: 'many' is not a whole number; write for example 100"),
        (["lag", "--max-seconds", "nan"], "--max-seconds: 'nan' is not a number of seconds"),
        (["rewind", "orders", "--to-position", "x"], "--to-position: 'x' is not a whole number"),
        (["rewind", "orders", "--to", "12"], "write it as transaction_id:position, for example 815:42"),
        (["redrive", "orders", "--rate", "0"], "--rate: 0 is not above 0"),
        (["adopt", "--table", "t", "--batch", "0"], "--batch: must be more than 0"),
        (["repair", "--pages", "0"], "--pages: must be more than 0"),
        (["prune", "--batch", "0"], "--batch: must be more than 0"),
        (["dead-letters", "list", "--check", "--limit", "0"], "--limit: must be more than 0"),
        (["held", "list", "--limit", "0"], "--limit: must be more than 0"),
        (["conflicts", "list", "--limit", "0"], "--limit: must be more than 0"),
        (["audit", "--limit", "0"], "--limit: must be more than 0"),
        (["status", "-o", "yaml"], "choose from"),
        (["run", "-f", "x", "--port", "web"], "--port: 'web' is not a whole number"),
    ],
)
def test_a_wrong_option_is_answered_in_words_of_a_person(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == Exit.USAGE
    assert said in told
    assert not [word for word in ("_natural", "invalid int", "invalid float", "Format value") if word in told]


@pytest.mark.parametrize("plugin", [False, True])
def test_the_version_is_told(capsys, plugin):
    with pytest.raises(SystemExit) as ended:
        main(["--version"], plugin=plugin)
    assert (ended.value.code, capsys.readouterr().out) == (0, f"outbox {__version__}\n")


def test_the_version_is_known_where_the_packages_lie_on_the_path_and_are_not_installed():
    """`python -S` knows no installed package: what the program needs is put on its path by hand."""
    folders = [ROOT / "worker" / "src", ROOT / "operator" / "src", ROOT / "tests" / "support" / "typing"]
    path = [*map(str, folders), *sys.path]
    code = f"import sys; sys.path[:] = {path!r}; "
    code += "import importlib.metadata as m; known = m.version; "
    code += "m.version = lambda name: 1 / 0 if name.startswith('outbox') else known(name); "
    code += "from outbox_cli.main import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"outbox {__version__}\n"


def test_every_place_that_names_the_version_names_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "charts" / "outbox-operator" / "Chart.yaml").read_text())
    assert {project["version"], chart["version"], chart["appVersion"]} == {__version__}


def test_a_cell_shows_the_end_of_a_transaction_id():
    assert format_cell("5929:9223372036854775807") == "5929:end"


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "outbox_cli.commands":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell
sys.meta_path.insert(0, Finder())
from outbox_cli.start import main
sys.argv = ["outbox", "status"]
main()
"""


def test_interrupted_while_it_imports_it_says_nothing_of_python():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
