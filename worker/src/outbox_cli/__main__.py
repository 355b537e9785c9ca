"""`python -m outbox_cli`: the same as `outbox`."""

import sys

from outbox_cli.start import main

sys.exit(main())
