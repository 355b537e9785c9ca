"""The scripts of the local cluster, in folders of a test's own: whose processes and folders they touch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.postgres import wait_until
from tests.tools.demo.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Shell = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "tools" / "cluster"
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


def test_the_sources_of_a_build_are_dropped_unless_another_run_builds(shell, place):
    sources = Path(place["OUTBOX_CACHE"]) / "go" / "mod"
    sources.mkdir(parents=True)
    drop = 'source "$SCRIPTS/parts/cluster.sh"; mkdir -p "$OUTBOX_CACHE/locks"; '
    assert shell(drop + 'with_lock "$OUTBOX_CACHE/locks/go-build" drop_go_sources').returncode == 0
    assert sources.exists()
    assert shell(drop + "drop_go_sources").returncode == 0
    assert not sources.parent.exists()


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


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a script said, without its clock."""
    assert done.returncode == 0, done.stderr
    return [line.partition("] ")[2] for line in done.stdout.splitlines()]


def test_what_takes_long_says_what_it_is_and_every_few_seconds_that_it_goes_on(shell):
    told = lines(shell("telling kubernetes/1.2.3 sleep 2.5; say after", OUTBOX_TELL_EVERY="1"))
    assert told[0] == "building kubernetes/1.2.3: about 7 min"
    assert re.fullmatch(r"still busy with kubernetes/1\.2\.3: [1-9] s of about 7 min", told[1])
    assert told[-1] == "after"
    assert 3 <= len(told) <= 5


def test_what_is_quick_is_not_announced(shell):
    assert lines(shell("telling chart true; say after")) == ["after"]


def test_a_failure_inside_what_is_told_is_still_one(shell):
    done = shell('makes() { false; touch "$1/made"; }; cached helm/1 makes; say not reached', OUTBOX_TELL_EVERY="1")
    assert done.returncode != 0
    assert "could not make helm/1" in done.stderr
    assert "not reached" not in done.stdout


def test_a_script_that_is_killed_leaves_nobody_who_goes_on_telling(shell, tmp_path):
    done = shell("telling kubernetes/1 eval \"echo $$ >'$NOTE'; kill -9 $$\"", NOTE=str(tmp_path / "pid"))
    assert done.returncode != 0
    # The pipe to the test is closed only when the last process that holds it has gone: run() returned, so it has.
    assert (tmp_path / "pid").exists()


def test_several_scripts_of_one_run_have_one_clock(shell):
    began = f"{time.time() - 100:.6f}"
    done = shell("say here", OUTBOX_BEGAN=began)
    seconds = float(done.stdout.partition("[")[2].partition(" s]")[0])
    assert 100 <= seconds < 130


def test_the_demo_says_first_what_is_built_and_about_how_long_that_takes(shell):
    assert shell("cold").returncode == 0, "nothing is cached in a folder of the test's own"
    assert shell('mkdir -p "$OUTBOX_CACHE/$(kubernetes_programs)"; ! cold').returncode == 0


def test_parts_are_set_up_side_by_side_and_one_that_fails_ends_the_others(place, tmp_path):
    scripts = shutil.copytree(SCRIPTS, tmp_path / "checkout" / "tests" / "tools" / "cluster")
    note = tmp_path / "pid"
    (scripts / "parts" / "cluster.sh").write_text('setup_cluster() { echo $$ >"$NOTE"; sleep 300; }')
    (scripts / "parts" / "python.sh").write_text(
        'setup_python() { until [ -s "$NOTE" ]; do sleep 0.1; done; fail no wheel; }'
    )
    done = subprocess.run(
        [scripts / "setup.sh", "cluster", "python"],
        env=os.environ | place | {"NOTE": str(note)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: no wheel\n"
    pid = int(note.read_text())
    wait_until(lambda: not is_alive(pid), "the other one is ended", 10)


def test_pushing_to_nowhere_is_refused_before_anything_is_prepared(place):
    done = subprocess.run(
        ["make", "push"], cwd=ROOT, env=os.environ | place, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert "push where? make push TO=registry.mycompany.net/outbox" in done.stderr
    assert list(Path(place["OUTBOX_CACHE"]).iterdir()) == []


def test_a_choice_of_no_test_in_either_pass_is_no_success(tmp_path):
    done = subprocess.run(
        [ROOT / "tests" / "passes.sh", "tests/unit/cli/test_speaking.py", "-k", "nothing_is_called_so", "-n", "0"],
        # Durations of a real run are not to be replaced by those of none.
        env={**os.environ, "OUTBOX_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 5, done.stdout + done.stderr
    assert "tests: no test is chosen by: tests/unit/cli/test_speaking.py -k nothing_is_called_so -n 0" in done.stderr
