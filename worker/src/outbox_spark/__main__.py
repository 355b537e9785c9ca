"""`python -m outbox_spark`: run the driver of one Spark processor."""

import sys

from outbox_worker.early_stop import end_when_told

end_when_told()

from outbox_spark.driver import main  # noqa: E402 - it takes seconds

sys.exit(main())
