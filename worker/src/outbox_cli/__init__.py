"""`outbox` and `kubectl outbox`: what a person runs against a database or a cluster.

Start with `commands.py`, the grammar. `context.py` decides what a command works on. Commands against a database are in
`database/`, a module for each; against a cluster in `cluster/resources.py`, whose only way to the API is
`cluster/client.py` (the one module that needs the package `kubernetes`); `running.py` runs a processor in the
foreground. How they speak: `console.py`.

This package stands above all others: it uses the worker's database adapter and the operator's resource models, and
nothing imports it.
"""
