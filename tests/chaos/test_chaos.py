"""Chaos in `make test`: a case of each mode, all at once, by a fixed seed: a push fails for what it changed.

At night every case runs by a random seed, which is printed, and each sabotage must be found out.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.chaos.rounds import SEED

ROOT = Path(__file__).resolve().parents[2]
SECONDS = int(os.environ.get("OUTBOX_CHAOS_SECONDS", "70"))
"""Of producing; with start, draining and counting about 130 s in all."""
NIGHT_SECONDS = 1200
"""Of producing, for all cases together."""


def run(seed: str, seconds: int, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    print(f"OUTBOX_SEED={seed}")
    command = [sys.executable, "-m", "tests.tools.chaos", "--seed", seed, "--seconds", str(seconds), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    return done.returncode, done.stdout


def keeps_every_promise(seed: str, seconds: int, *arguments: str) -> None:
    status, said = run(seed, seconds, *arguments)
    assert status == 0, f"seed {seed} ended with {status}:\n{said[-12_000:]}"
    assert "every promise was kept" in said
    assert "each was found" in said, "the judge was not tested on what this run found"


def random_seed() -> str:
    return os.environ.get("OUTBOX_SEED") or str(secrets.randbelow(1_000_000))


@pytest.mark.timeout(SECONDS + 400)
def test_every_promise_is_kept_under_faults_by_a_seed() -> None:
    keeps_every_promise(os.environ.get("OUTBOX_SEED") or str(SEED), SECONDS, "--sample")


@pytest.mark.nightly
@pytest.mark.timeout(NIGHT_SECONDS + 2400)
def test_every_promise_is_kept_by_every_case_under_faults_of_a_random_seed() -> None:
    keeps_every_promise(random_seed(), NIGHT_SECONDS)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("sabotage", "cases"),
    [
        ("checkpoint", "ordered-sql,partitioned-sql,snapshot-ordered-sql"),
        ("fence", "ordered-sql,partitioned-sql,snapshot-ordered-sql"),
        ("attempt", "competing-sql,competing-python,queue-sql"),
        ("line", "partitioned-*"),
        ("numbers", "stream-*"),
        ("record", "kafka-once-*"),
    ],
)
def test_a_safeguard_that_is_gone_is_found_out(sabotage: str, cases: str) -> None:
    status, said = run(random_seed(), 150, "--sabotage", sabotage, "--case", cases)
    assert status == 1, said[-4000:]
    assert "VIOLATION" in said
