"""`python -m outbox_cli`: the same as `outbox`."""

import sys

from outbox_cli.main import main

sys.exit(main())
