"""`make chaos`: a run by a seed, in namespaces of its own.

Mounts, processes and the network are private, so that a full disk, a port and a process that is left over are nobody
else's, and everything is gone when this process is. Ends with 0: every promise was kept; 1: one was broken, or the
judge overlooked a fault that was planted; 2: chaos itself failed, and says nothing of the product.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

from tests.chaos.cases import CASES, select_cases
from tests.chaos.director import Director, Plan
from tests.chaos.schedule import as_json, build_schedule
from tests.chaos.servers import SABOTAGE

INSIDE: Final = "OUTBOX_CHAOS_INSIDE"
KEPT: Final = ("schedule.json", "faults.jsonl", "ledger.txt")
"""What stays of a run without a violation."""


def main() -> int:
    """Read the command line, print the seed, and run."""
    arguments = read_arguments()
    try:
        cases = select_cases([name for names in arguments.case for name in names.split(",") if name])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    seed, seconds = arguments.seed, float(arguments.seconds)
    schedule = build_schedule(seed, seconds, cases)
    if arguments.schedule:
        print(json.dumps(as_json(seed, seconds, cases, schedule), indent=1))
        return 0
    if not os.environ.get(INSIDE):
        enter_namespaces(seed)
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix=f"outbox-chaos-{seed}-", dir="/tmp"))
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    plan = Plan(seed, seconds, cases, schedule, directory, arguments.sabotage)
    (directory / "schedule.json").write_text(json.dumps(as_json(seed, seconds, cases, schedule), indent=1) + "\n")
    again = f"make chaos SEED={seed} SECONDS={seconds:g}" + (
        "" if len(cases) == len(CASES) else f" CASE={','.join(case.name for case in cases)}"
    )
    say(f"chaos: seed {seed}, {seconds:g} s, {len(schedule)} faults for {', '.join(case.name for case in cases)}")
    say(f"schedule: {directory / 'schedule.json'}")
    status = run(plan)
    if status == 0:
        for path in directory.iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    say({0: "every promise was kept", 1: "A PROMISE WAS BROKEN", 2: "CHAOS ITSELF FAILED"}[status])
    say(f"what is known of it: {directory}\nagain: {again}")
    return status


def read_arguments() -> argparse.Namespace:
    """Read the command line; without a seed a random one."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Faults by a seed, and a ledger at the end.")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--seconds", type=float, default=600, help="how long producers produce (%(default)s)")
    parser.add_argument("--case", action="append", default=[], help="names with commas between, or a prefix and *")
    parser.add_argument("--directory", type=Path, help="where the run's files go")
    parser.add_argument(
        "--sabotage", choices=sorted(path.stem for path in SABOTAGE.glob("*.sql")), default="",
        help="take a safeguard out of the product's database first, to see the run fail",
    )  # fmt: skip
    parser.add_argument("--schedule", action="store_true", help="print the seed's schedule and do nothing")
    return parser.parse_args()


def enter_namespaces(seed: int) -> None:
    """Become the same program, with the same seed, in namespaces of its own."""
    if os.geteuid() != 0:
        sys.exit("make chaos needs root: it mounts a small disk, and has a network and processes of its own")
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, "-m", "tests.chaos", *sys.argv[1:], "--seed", str(seed)]
    os.execvpe(command[0], command, os.environ | {INSIDE: "1"})


def run(plan: Plan) -> int:
    """Run it; return the exit status."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    director: Director | None = None
    began = time.monotonic()
    try:
        director = Director(plan, say)
        say(f"servers and workers are up after {time.monotonic() - began:.1f} s")
        return 0 if director.run() else 1
    except Exception:  # noqa: BLE001  # whatever it is, it is ours
        traceback.print_exc()
        return 2
    finally:
        if director is not None:
            director.close()


def say(text: str) -> None:
    """Print at once: whoever reads along through a pipe sees it too."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
