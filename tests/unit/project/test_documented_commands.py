"""Every command and every exit status stands in docs/cli.md."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from outbox_cli.errors import Exit
from outbox_cli.main import build_parser

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "cli.md").read_text()


def commands(parser: argparse.ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found += [f"{name} {deeper}" for deeper in commands(child)] or [name]
    return found


@pytest.mark.parametrize("command", commands(build_parser(plugin=False)))
def test_command_stands_on_the_page(command: str) -> None:
    assert f"outbox {command} " in PAGE or f"`{command}`" in PAGE or f"outbox {command}\n" in PAGE


@pytest.mark.parametrize("status", list(Exit))
def test_exit_status_stands_on_the_page(status: Exit) -> None:
    assert f"| {status.value} |" in PAGE


@pytest.mark.parametrize("top", ["docs", "examples", "operator", "sql", "worker"])
def test_nobody_is_told_to_install_what_is_not_published(top: str) -> None:
    """ "Nothing is published yet" (README.md), so pip finds no package of this name: it is installed from the clone."""
    assert "Nothing is published yet" in (ROOT / "README.md").read_text()
    said = [path for path in (ROOT / top).rglob("*") if path.suffix in (".md", ".py", ".yaml")]
    assert [str(path) for path in said if "pip install 'outbox-operator[cli]" in path.read_text()] == []
    assert "pip install '.[cli]'" in (ROOT / "README.md").read_text()
    assert "pip install '.[cli]'" in PAGE
