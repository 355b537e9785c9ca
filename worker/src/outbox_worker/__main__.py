"""`python -m outbox_worker`: run one processor."""

import sys

from outbox_worker.main import main

sys.exit(main())
