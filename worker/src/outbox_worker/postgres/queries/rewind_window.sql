-- Put a checkpoint of cursor Snapshot to a window, and record it.
SELECT {schema}.rewind_processor_window(%(processor_id)s, %(partition)s, %(to_lower)s::text::pg_snapshot,
                                        %(to_upper)s::text::pg_snapshot, %(to_position)s, %(reason)s, %(decided_by)s)
