"""`python -m outbox_spark`: run the driver of one Spark processor."""

import sys

from outbox_spark.driver import main

sys.exit(main())
