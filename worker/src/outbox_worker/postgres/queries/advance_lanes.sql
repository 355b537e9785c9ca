-- Put other partitions' checkpoints to where their messages were handled in this transaction.
SELECT {schema}.advance_lanes(
    %(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(standing)s, %(partitions)s::int[],
    %(transaction_ids)s::text[]::xid8[], %(positions)s::bigint[], %(lowers)s::text[]::pg_snapshot[],
    %(uppers)s::text[]::pg_snapshot[], %(window_positions)s::bigint[])
