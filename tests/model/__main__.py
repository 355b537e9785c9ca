"""`make model`: everything that is asked of the models, the large questions too, with the number of states."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.model.cases import AGAIN, BAD, GOOD, LARGE, POSSIBLE
from tests.model.checker import HOLDS, check


def main() -> int:
    """Print a line for each case; 1 if one came out otherwise."""
    wrong = 0
    print(f"{'states':>9} {'seconds':>7}  verdict", flush=True)
    for case in (*GOOD, *LARGE, *BAD, *AGAIN, *POSSIBLE):
        with tempfile.TemporaryDirectory(prefix="outbox-model-") as place:
            result = check(case.question, Path(place), long=case in LARGE)
        asked = result.verdict == case.verdict
        wrong += not asked
        found = "holds" if result.verdict == HOLDS else f"{result.verdict} fails after {len(result.trace) - 1} steps"
        print(f"{result.states:>9,} {result.seconds:>7.1f}  {case.name}: {found}", flush=True)
        if not asked:
            print(f"WRONG: {case.verdict} was to be found\n{result.output}", flush=True)
    print(f"{wrong} of {len((*GOOD, *LARGE, *BAD, *AGAIN, *POSSIBLE))} otherwise than they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
