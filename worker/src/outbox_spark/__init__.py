"""The Spark engine: an outbox as a data source, and the driver of a processor on it.

Start at `offsets.py` (an offset is a checkpoint) and `resume.py` (the database is the authority): both pure.
`source.py` is what a notebook uses; `driver.py` is the operator's process: the worker's loop over `pipeline.py`.
"""
