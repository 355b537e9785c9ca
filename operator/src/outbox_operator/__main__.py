"""`python -m outbox_operator`."""

import os
import signal

# Until `main` has a handler: process 1 of a container ignores a signal without one, and the imports take seconds.
signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

from outbox_operator.main import main  # noqa: E402

if __name__ == "__main__":
    main()
