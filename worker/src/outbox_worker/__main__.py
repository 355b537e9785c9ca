"""`python -m outbox_worker`: run one processor."""

import logging
import os
import sys
from contextlib import suppress

from outbox_worker.early_stop import end_when_told

end_when_told()

from outbox_worker.main import main  # noqa: E402 - it takes seconds

code = main()
logging.shutdown()
# What a handler printed: target `log` has written what it confirmed. None: the process was started without an output.
if sys.stdout is not None:
    with suppress(OSError):  # a full disk, a reader that is gone
        sys.stdout.flush()
# Everything is given back. A daemon thread may wait for the network now, and with a lock that the interpreter asks for
# at its end: under `make chaos` a process was there 30 s after its last word, until it was killed.
os._exit(code)
