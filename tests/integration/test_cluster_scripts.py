"""The scripts of the local cluster, in folders of a test's own: whose processes and folders they touch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.demo.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Shell = Callable[..., subprocess.CompletedProcess[str]]

SCRIPTS = Path(__file__).resolve().parents[1] / "cluster"
SOURCED = 'set -euo pipefail; for part in lib process owner load build; do source "$SCRIPTS/$part.sh"; done\n'


@pytest.fixture
def place(tmp_path) -> dict[str, str]:
    """Folders with blanks in their names."""
    names = {name: tmp_path / f"the {name}" for name in ("OUTBOX_CACHE", "OUTBOX_STATE", "OUTBOX_RUN")}
    for folder in names.values():
        folder.mkdir()
    return {name: str(folder) for name, folder in names.items()}


@pytest.fixture
def shell(place) -> Shell:
    def run(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | place | {"SCRIPTS": str(SCRIPTS)} | environment
        return subprocess.run(
            ["bash", "-c", SOURCED + text], env=variables, capture_output=True, text=True, check=False, timeout=60
        )

    return run


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with us."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_another_run_is_refused_while_the_one_that_holds_the_cluster_lives(shell, stranger):
    assert shell(f"claim {stranger.pid} 'make demo'").returncode == 0
    refused = shell("refuse_if_owned")
    assert refused.returncode == 1
    assert f"in use by process {stranger.pid} (make demo): wait for it or end it" in refused.stderr
    stranger.kill()
    stranger.wait()
    assert shell("refuse_if_owned").returncode == 0, "a run that was killed holds nothing"


def test_who_holds_the_cluster_may_go_on_using_it(shell):
    assert shell(f"claim {os.getpid()} 'make test'").returncode == 0
    assert shell("refuse_if_owned").returncode == 0


def test_a_process_that_was_given_the_same_number_since_is_a_stranger(shell, place, stranger):
    (Path(place["OUTBOX_STATE"]) / "owner").write_text(f"{stranger.pid} 1 another-boot make demo\n")
    assert shell("refuse_if_owned").returncode == 0
    pids = Path(place["OUTBOX_RUN"]) / "pids"
    pids.mkdir()
    (pids / "kubelet").write_text(f"{stranger.pid} 1 another-boot\n")
    assert shell("stop_process kubelet").returncode == 0
    assert stranger.poll() is None
    assert not (pids / "kubelet").exists()


def test_what_was_started_outlives_the_shell_and_is_ended_by_what_was_recorded(shell):
    started = shell("start_process waiter sleep 300; recorded waiter")
    pid = int(started.stdout)
    assert is_alive(pid)
    assert shell("recorded waiter").stdout == started.stdout
    assert shell("stop_process waiter; recorded waiter").returncode == 1
    assert not is_alive(pid)


def test_a_folder_is_there_whole_or_not_at_all(shell, place):
    uv = Path(place["OUTBOX_CACHE"]) / "uv"
    (uv / ".tmp-1-killed").mkdir(parents=True)
    other = Path(place["OUTBOX_CACHE"]) / "base" / ".tmp-bookworm-at-work"
    other.mkdir(parents=True)
    failed = shell('half() { touch "$1/one"; false; }; cached uv/1 half')
    assert failed.returncode == 1
    assert "could not make uv/1" in failed.stderr
    assert list(uv.iterdir()) == [], "nor is anything left of the run before, which was killed"
    assert shell('whole() { touch "$1/one"; }; cached uv/1 whole; cached uv/1 false').returncode == 0
    assert [path.name for path in uv.rglob("*")] == ["1", "one"]
    assert other.exists(), "another run is at it"


def test_old_ones_are_removed_by_their_whole_names(shell, place):
    wheels = Path(place["OUTBOX_CACHE"]) / "wheels"
    for age, name in enumerate(("new", "older", "oldest")):
        (wheels / name).mkdir(parents=True)
        os.utime(wheels / name, (1_000_000 - age, 1_000_000 - age))
    # What a name that is cut at its blank would hit.
    bystander = wheels.parent.parent / "the"
    bystander.mkdir()
    assert shell('keep_newest "$OUTBOX_CACHE/wheels" 1').returncode == 0
    assert [path.name for path in wheels.iterdir()] == ["new"]
    assert bystander.exists()


@pytest.mark.parametrize(
    "folder", ["/", "/var", "/var/lib", "/var/lib/", "/var/cache", "state", "./state", "/srv/../etc/x"]
)
def test_a_folder_of_the_machine_is_no_place_for_the_cluster(shell, folder):
    refused = shell("true", OUTBOX_STATE=folder)
    assert refused.returncode == 1
    assert f"{folder} cannot be a folder of the local cluster" in refused.stderr
