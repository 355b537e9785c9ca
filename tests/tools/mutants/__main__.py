"""`make mutants`: plants one known fault after the other into a copy of the checkout, and runs the tests that catch it.

A test suite is worth what it would have found. The table of faults is `faults.py`; for each fault only the tests that
are named beside it run. First they run without any fault, and must pass. Ends with 0: each fault was caught; 1: one
survived; 2: nothing can be said, because a fault's text is gone, the code with it does not start, or a test fails
without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.tools.mutants.faults import FAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.mutants.fault import Fault

CHECKOUT: Final = Path(__file__).resolve().parents[3]
TEST_SECONDS: Final = 120
"""For one test: a fault may let it wait for what never comes."""
_PATHS: Final = ("operator/src", "worker/src", "tests/support/typing")
"""Before the environment's own, which are the checkout's."""


class Verdict(StrEnum):
    """What came of one fault."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on a fault, with the test that failed first, or the end of what pytest printed."""

    fault: Fault
    verdict: Verdict
    told: str
    seconds: float


def find_lost(faults: Sequence[Fault], root: Path) -> list[str]:
    """Name each fault that cannot be planted: its text must stand in its file exactly once."""
    lost = []
    for fault in faults:
        for edit in fault.edits:
            path = root / edit.path
            count = path.read_text().count(edit.old) if path.exists() else 0
            if count != 1:
                lost.append(f"{fault.name}: {edit.path} has its text {count} times, not once: {edit.old!r}")
        lost += [
            f"{fault.name}: there is no {test}" for test in fault.tests if not (root / test.split("::")[0]).exists()
        ]
    return lost


def copy_checkout(place: Path) -> None:
    """Copy what git knows or would take, and lead to the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, place / name, follow_symlinks=False)
    (place / ".venv").symlink_to(Path(sys.prefix))


def run_tests(place: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests of the copy to the first that fails; return pytest's exit code and what it printed."""
    paths = os.pathsep.join(str(place / path) for path in _PATHS)
    # Compiled files are told apart by second and size: one fault could run with the code of the one before.
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-q", "-x", "--tb=line"]
    done = subprocess.run(
        [*command, f"--timeout={TEST_SECONDS}", *tests],
        cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def try_fault(fault: Fault, place: Path) -> Finding:
    """Plant a fault, run its tests, and take it out again."""
    began = time.monotonic()
    originals = {place / edit.path: (place / edit.path).read_text() for edit in fault.edits}
    try:
        for edit in fault.edits:
            path = place / edit.path
            path.write_text(path.read_text().replace(edit.old, edit.new))
        status, said = run_tests(place, fault.tests)
    finally:
        for path, text in originals.items():
            path.write_text(text)
    return judge(fault, status, said, time.monotonic() - began)


def judge(fault: Fault, status: int, said: str, seconds: float) -> Finding:
    """Tell a test that failed from code that does not start: an error in a fixture or at collection catches nothing."""
    failed = re.findall(r"^FAILED (\S+)", said, re.MULTILINE)
    if status == 0:
        return Finding(fault, Verdict.SURVIVED, ", ".join(fault.tests), seconds)
    if status == 1 and failed:
        return Finding(fault, Verdict.CAUGHT, failed[0], seconds)
    return Finding(fault, Verdict.BROKEN, said[-2000:], seconds)


def select_faults(words: str) -> list[Fault]:
    """Return the faults whose names have one of the words (commas between); all without words."""
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    return [fault for fault in FAULTS if not wanted or any(word in fault.name.lower() for word in wanted)]


def main() -> int:
    """Try the chosen faults; return the exit code."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Plants known faults, and sees them caught.")
    parser.add_argument("--only", default="", help="faults whose names have one of these words, commas between")
    words = parser.parse_args().only
    faults = select_faults(words)
    if not faults:
        print(f"no fault's name in tests/tools/mutants has one of these words: {words}", file=sys.stderr)
        return 2
    if lost := find_lost(faults, CHECKOUT):
        print("\n".join(lost), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="outbox-mutants-") as directory:
        place = Path(directory)
        copy_checkout(place)
        status, said = run_tests(place, sorted({test for fault in faults for test in fault.tests}))
        if status != 0:
            print(f"the tests do not pass without a fault:\n{said[-4000:]}", file=sys.stderr)
            return 2
        findings = []
        for fault in faults:
            findings.append(finding := try_fault(fault, place))
            print(f"{finding.verdict:<8} {finding.seconds:6.1f} s  {fault.name}: {finding.told}", flush=True)
    counts = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    print(f"{len(findings)} faults: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts[Verdict.SURVIVED] else 2 if counts[Verdict.BROKEN] else 0


if __name__ == "__main__":
    sys.exit(main())
