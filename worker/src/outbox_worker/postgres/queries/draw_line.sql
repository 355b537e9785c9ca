-- Cursor Snapshot: draw the barrier of a change that was asked for.
SELECT {schema}.draw_snapshot_line(%(processor_id)s, %(claim_uid)s)
