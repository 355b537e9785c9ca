-- The stored pairs of all partitions.
SELECT c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position, c.stored_at
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s
ORDER BY c.partition
