"""The domain every process shares: pure values and decisions, no I/O.

Start with `checkpoint.py` (what a checkpoint is and how two are compared), then `spec/` (what a user can ask for),
`report.py` (what a worker says of itself) and `processor.py` (what a worker does next). Nothing here opens a socket,
reads a clock or knows Kubernetes, PostgreSQL's driver or Spark.
"""
