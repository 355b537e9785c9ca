"""What `outbox run` counts crashes under: the same over starts of the same text, another one for a changed handler."""

from __future__ import annotations

import os

import pytest

from outbox_cli.running import find_text_id


@pytest.fixture
def handler(tmp_path):
    (tmp_path / "code" / "parts").mkdir(parents=True)
    (tmp_path / "code" / "orders.py").write_text("a")
    (tmp_path / "code" / "parts" / "more.py").write_text("b")
    (tmp_path / "link").symlink_to(tmp_path / "code")
    return tmp_path / "link"


def test_it_is_the_same_for_the_same_text_whenever_it_was_written(handler):
    before = find_text_id("{}", handler)
    os.utime(handler / "orders.py", (1, 1))
    (handler / "orders.log").write_text("not code")
    assert find_text_id("{}", handler) == before
    assert 0 < before < 2**63


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda code: (code / "orders.py").write_text("c"), id="the handler"),
        pytest.param(lambda code: (code / "parts" / "more.py").write_text("c"), id="a file beside it"),
        pytest.param(lambda code: (code / "orders.py").rename(code / "others.py"), id="a name"),
        pytest.param(lambda code: (code / "parts" / "more.py").unlink(), id="a file less"),
    ],
)
def test_another_handler_gives_another(handler, change):
    before = find_text_id("{}", handler)
    change(handler)
    assert find_text_id("{}", handler) != before


def test_what_is_hidden_or_no_file_is_not_looked_into(handler):
    before = find_text_id("{}", handler)
    (handler / ".#orders.py").symlink_to("somebody@somewhere.4711")  # Emacs' lock
    (handler / "gone.py").symlink_to("nowhere.py")
    (handler / "folder.py").mkdir()
    (handler / ".venv" / "lib").mkdir(parents=True)
    (handler / ".venv" / "lib" / "six.py").write_text("x")
    assert find_text_id("{}", handler) == before


def test_another_manifest_gives_another(handler):
    assert find_text_id("{}", handler) != find_text_id('{"a": 1}', handler)
