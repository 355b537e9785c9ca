-- Give each partition a window of its own to start from, in the transaction that divides the processor.
SELECT {schema}.spread_windows(
    %(processor_id)s, %(partitions)s::int[], %(lowers)s::text[]::pg_snapshot[], %(uppers)s::text[]::pg_snapshot[],
    %(window_positions)s::bigint[], %(partition)s, %(epoch)s, %(token)s::uuid)
