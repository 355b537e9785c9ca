"""The programs `outbox` and `kubectl outbox`. `outbox try` does not wait for what the other commands import."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run one command of `outbox`."""
    return _run(plugin=False)


def kubectl() -> int:
    """Run one command of `kubectl outbox`."""
    return _run(plugin=True)


def _run(*, plugin: bool) -> int:
    if sys.argv[1:2] == ["try"]:
        # Nothing is made yet, so Ctrl-C may end the process at once: as an exception it can be lost in an import.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from outbox_cli.try_out.run import main as run_try

        return run_try(sys.argv[2:])
    from outbox_cli.main import main as run

    return run(plugin=plugin)
