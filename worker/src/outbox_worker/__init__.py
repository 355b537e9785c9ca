"""The worker: one process that owns a processor, or is its standby.

Start reading at `outbox_core.processor.lifecycle` (what is decided) and `engine/loop.py` (how it is carried out).
`main.py` puts the parts together, `wiring.py` those of each mode; `engine/steps.py` says what does a step;
`postgres/transactions/transaction.py` is the promise that effects and checkpoint commit together;
`ownership/heartbeat.py` is the heartbeat; `targets/` are the targets; `postgres/` is everything that knows SQL.
"""
