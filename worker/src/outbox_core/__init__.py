"""The domain every process shares: pure values and decisions, no I/O.

Start with `progress/checkpoint.py` (what a checkpoint is and how two are compared), then `spec/` (what a user can ask
for), `report.py` (what a worker says of itself) and `processor/lifecycle.py` (what a worker does next). Nothing here
opens a socket, reads a clock or knows Kubernetes, PostgreSQL's driver or Spark.
"""

from typing import Final

__version__: Final = "0.1.0"
"""The version of all packages, as `pyproject.toml` and the chart have it."""
