-- All partitions start from this window, in the transaction that divided the processor.
SELECT {schema}.begin_windows(%(processor_id)s, %(start_lower)s::text::pg_snapshot, %(start_upper)s::text::pg_snapshot,
                              %(start_position)s, %(partition)s, %(epoch)s, %(token)s::uuid)
