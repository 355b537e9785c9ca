-- Give each partition a start of its own, in the transaction that divides the processor.
SELECT {schema}.spread_start(
    %(processor_id)s, %(partitions)s::int[], %(transaction_ids)s::text[]::xid8[], %(positions)s::bigint[],
    %(partition)s, %(epoch)s, %(token)s::uuid)
