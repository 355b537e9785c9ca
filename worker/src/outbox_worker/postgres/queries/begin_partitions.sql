-- Divide the processor and start all its partitions at one pair, or learn how it is divided. No pair: only learn.
SELECT owned, partition_count, key, begun
FROM {schema}.begin_partitions(%(processor_id)s, %(count)s, %(key)s, %(start_transaction_id)s::text::xid8,
                               %(start_position)s, %(partition)s, %(epoch)s, %(token)s)
