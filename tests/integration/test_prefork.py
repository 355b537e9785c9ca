"""A forked program is what a started one is: its output, its exit status, its folder, its environment, its signals."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.support import prefork


@pytest.fixture
def start(tmp_path):
    (tmp_path / "program.py").write_text(
        "import json, os, sys, time\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get('SEEN'), os.environ.get('UNSEEN')]), flush=True)\n"
        "print('an error', file=sys.stderr)\n"
        "if 'sleep' in sys.argv: time.sleep(600)\n"
        "sys.exit(7)\n"
    )

    def start(*arguments):
        env = {"SEEN": "yes", "PATH": os.environ["PATH"]}
        with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
            return prefork.server().start("program", arguments, cwd=tmp_path, env=env, out=out, err=err)

    return start


def test_it_has_its_own_arguments_folder_environment_files_and_status(start, tmp_path, monkeypatch):
    monkeypatch.setenv("UNSEEN", "the test's own")
    process = start("a", "b c")
    assert process.wait(30) == 7
    assert process.poll() == 7
    expected = f'[["a", "b c"], "{tmp_path}", "yes", null]\n'
    assert (tmp_path / "out").read_text() == expected
    assert (tmp_path / "err").read_text() == "an error\n"


def test_it_is_killed_alone(start):
    first, second = start("sleep"), start("sleep")
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.1)
    first.kill()
    assert first.wait(30) == -signal.SIGKILL
    assert second.poll() is None
    second.terminate()
    assert second.wait(30) == -signal.SIGTERM
