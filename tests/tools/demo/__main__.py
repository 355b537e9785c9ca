"""The demo: the main job end to end, with intruders and kills, and a ledger that decides its exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback

from tests.tools.demo.place import read_place
from tests.tools.demo.progress import Progress
from tests.tools.demo.story import Story
from tests.tools.demo.waiting import PATIENCE


def main() -> int:
    """Run the story; 0 when every promise held, else 1 with the cluster's state printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.demo", description="The main job, end to end.")
    parser.add_argument("--messages", type=int, default=100_000, help="order messages, at least")
    parser.add_argument("--seconds", type=float, default=85.0, help="spread them over about so long")
    parser.add_argument("--seed", type=int, default=1, help="of producers and planted faults")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = float(os.environ.get("OUTBOX_BEGAN", time.time()))
    progress = Progress(began=began)
    story = Story(read_place(), progress, arguments.messages, arguments.seconds, arguments.seed)
    try:
        failures = story.run()
    except Exception as error:  # noqa: BLE001  # whatever it was, the cluster's state explains it
        progress.say(f"FAILED: {error}")
        traceback.print_exc()
        story.print_state()
        failures = [str(error)]
    finally:
        story.close()
    if failures:
        progress.print_lines(["", "VERDICT: failed", *(f"  - {failure}" for failure in failures)])
        return 1
    slack = "" if PATIENCE == 1 else f", with {PATIENCE:g} times the promised deadlines"
    progress.print_lines(["", f"VERDICT: every promise held ({progress.elapsed():.0f} s in all{slack})", ""])
    story.print_what_next()
    return 0


if __name__ == "__main__":
    sys.exit(main())
