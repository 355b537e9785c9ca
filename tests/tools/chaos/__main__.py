"""`make chaos`: a run by a seed, in namespaces of its own; many cases come in rounds, each a run like any other.

Mounts, processes and the network are private, so that a full disk, a port and a process that is left over are nobody
else's, and everything is gone when this process is. Ends with 0: every promise was kept; 1: one was broken, or the
judge overlooked a fault that was planted; 2: chaos itself failed, or saw too little to
say anything of the product.
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
from typing import TYPE_CHECKING, Any, Final

from tests.tools.chaos.cases import CASES, select_cases
from tests.tools.chaos.director import RESULT, Director, Plan
from tests.tools.chaos.result import add_up, from_json
from tests.tools.chaos.rounds import MOST_AT_ONCE, deal_rounds, draw_sample
from tests.tools.chaos.schedule import as_json, build_schedule
from tests.tools.chaos.servers import SABOTAGE
from tests.tools.chaos.summary import format_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.chaos.cases import Case

INSIDE: Final = "OUTBOX_CHAOS_INSIDE"
KEPT: Final = ("schedule.json", "faults.jsonl", "ledger.txt", RESULT)
"""What stays of a run without a violation."""
SAID: Final = {0: "every promise was kept", 1: "A PROMISE WAS BROKEN", 2: "CHAOS ITSELF FAILED, OR SAW TOO LITTLE"}


def main() -> int:
    """Read the command line, print the seed, and run."""
    arguments = read_arguments()
    try:
        cases = select_cases([name for names in arguments.case for name in names.split(",") if name])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.sample:
        cases = draw_sample(arguments.seed, cases)
    if arguments.schedule:
        print(json.dumps(draw(arguments, cases), indent=1))
        return 0
    if len(cases) > MOST_AT_ONCE:
        return run_rounds(arguments, cases)
    if not os.environ.get(INSIDE):
        enter_namespaces(arguments)
    return run_one(arguments, cases)


def draw(arguments: argparse.Namespace, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the schedule of a run as its file has it."""
    seed, seconds = arguments.seed, arguments.seconds
    return as_json(seed, seconds, cases, build_schedule(seed, seconds, cases))


def run_rounds(arguments: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Run a few cases at a time, each round for its share of the time, and add the results up."""
    seed = arguments.seed
    rounds = deal_rounds(seed, cases)
    seconds = arguments.seconds / len(rounds)
    directory = make_directory(arguments)
    say(f"chaos: seed {seed}, {len(cases)} cases in {len(rounds)} rounds of {seconds:g} s")
    results, statuses = [], []
    for number, of_round in enumerate(rounds, 1):
        command = [sys.executable, "-m", "tests.tools.chaos", "--seed", str(seed), "--seconds", f"{seconds:g}"]
        command += [
            "--case",
            ",".join(case.name for case in of_round),
            "--directory",
            str(directory / f"round-{number}"),
        ]
        command += ["--sabotage", arguments.sabotage] if arguments.sabotage else []
        say(f"\nround {number} of {len(rounds)}")
        statuses.append(subprocess.run(command, check=False).returncode)
        result = directory / f"round-{number}" / RESULT
        if result.exists():
            results.append(from_json(json.loads(result.read_text())))
    say(f"\nall {len(rounds)} rounds of seed {seed}")
    lines = format_result(add_up(results))
    (directory / "ledger.txt").write_text("\n".join(lines) + "\n")
    for line in lines:
        say(line)
    # A broken promise is the worst that can be said, also beside a round of which nothing can be said.
    status = next((found for found in (1, 2) if found in statuses), max(statuses))
    say(SAID.get(status, f"a round ended with {status}"))
    say(f"what is known of it: {directory}\nagain: {again(arguments, cases)}")
    return status


def run_one(arguments: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Run some cases at once."""
    seed, seconds = arguments.seed, arguments.seconds
    directory = make_directory(arguments)
    schedule = build_schedule(seed, seconds, cases)
    (directory / "schedule.json").write_text(json.dumps(draw(arguments, cases), indent=1) + "\n")
    say(f"chaos: seed {seed}, {seconds:g} s, {len(schedule)} faults for {', '.join(case.name for case in cases)}")
    say(f"again: {again(arguments, cases)}\nschedule: {directory / 'schedule.json'}")
    status = run(Plan(seed, seconds, cases, schedule, directory, arguments.sabotage))
    if status == 0:
        for path in directory.iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    say(SAID[status])
    say(f"what is known of it: {directory}\nagain: {again(arguments, cases)}")
    return status


def make_directory(arguments: argparse.Namespace) -> Path:
    """Return the directory for the run's files."""
    name = f"outbox-chaos-{arguments.seed}-"
    directory: Path = arguments.directory or Path(tempfile.mkdtemp(prefix=name, dir="/tmp"))
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    return directory


def again(arguments: argparse.Namespace, cases: Sequence[Case]) -> str:
    """Return the command that repeats the run: the same faults at the same times."""
    version = os.environ.get("OUTBOX_CHAOS_POSTGRES")
    chosen = "" if len(cases) == len(CASES) else f" CASE={','.join(case.name for case in cases)}"
    return (
        (f"OUTBOX_CHAOS_POSTGRES={version} " if version else "")
        + f"make chaos SEED={arguments.seed} SECONDS={arguments.seconds:g}{chosen}"
        + (f" SABOTAGE={arguments.sabotage}" if arguments.sabotage else "")
    )


def read_arguments() -> argparse.Namespace:
    """Read the command line; without a seed a random one."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Faults by a seed, and a ledger at the end.")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--seconds", type=float, default=600, help="how long producers produce (%(default)s)")
    parser.add_argument("--case", action="append", default=[], help="names with commas between, or a prefix and *")
    parser.add_argument("--sample", action="store_true", help="one case of each mode, drawn by the seed")
    parser.add_argument("--directory", type=Path, help="where the run's files go")
    parser.add_argument(
        "--sabotage", choices=sorted(path.stem for path in SABOTAGE.glob("*.sql")), default="",
        help="take a safeguard out of the product's database first, to see the run fail",
    )  # fmt: skip
    parser.add_argument("--schedule", action="store_true", help="print the seed's schedule and do nothing")
    return parser.parse_args()


def enter_namespaces(arguments: argparse.Namespace) -> None:
    """Become the same program, with the same seed, in namespaces of its own."""
    if os.geteuid() != 0:
        sys.exit("make chaos needs root: it mounts a small disk, and has a network and processes of its own")
    command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, "-m", "tests.tools.chaos", *sys.argv[1:], "--seed", str(arguments.seed)]
    os.execvpe(command[0], command, os.environ | {INSIDE: "1"})


def run(plan: Plan) -> int:
    """Run it; return the exit status."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    director: Director | None = None
    began = time.monotonic()
    try:
        director = Director(plan, say)
        say(f"servers and workers are up after {time.monotonic() - began:.1f} s")
        return director.run()
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
