"""The programs `outbox` and `kubectl outbox`. `outbox try` does not wait for what the other commands import."""

from __future__ import annotations

import signal
import sys

from outbox_worker.early_stop import end_when_told


def main() -> int:
    """Run one command of `outbox`."""
    return _run(plugin=False)


def kubectl() -> int:
    """Run one command of `kubectl outbox`."""
    return _run(plugin=True)


def _run(*, plugin: bool) -> int:
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        # Nothing is made yet, so Ctrl-C may end the process at once: as an exception it can be lost in an import.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["try"]:
        from outbox_cli.try_out.run import main as run_try

        return run_try(sys.argv[2:])
    end_when_told()
    from outbox_cli.main import main as run

    # In a container this is process 1, which hears no signal without a handler. Told to stop, it stops as by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(plugin=plugin)
