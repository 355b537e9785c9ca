"""The programs `outbox` and `kubectl outbox`. `outbox try` does not wait for what the other commands import."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run one command of `outbox`."""
    if sys.argv[1:2] == ["try"]:
        return _try()
    from outbox_cli.main import main as run

    return run()


def kubectl() -> int:
    """Run one command of `kubectl outbox`."""
    if sys.argv[1:2] == ["try"]:
        return _try()
    from outbox_cli.main import kubectl as run

    return run()


def _try() -> int:
    # Nothing is made yet, so Ctrl-C may end the process at once: as an exception it can be lost in an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outbox_cli.try_out.run import main as run

    return run(sys.argv[2:])
