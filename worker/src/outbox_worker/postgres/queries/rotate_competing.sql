-- Empties what holds dead rows only.
SELECT {schema}.rotate_competing() || {schema}.rotate_queue(%(processor_id)s, %(keep)s, %(segment_bytes)s)
