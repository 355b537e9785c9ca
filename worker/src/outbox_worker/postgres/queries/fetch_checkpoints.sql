-- The stored pairs of all partitions.
SELECT c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position, c.stored_at,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.window_position
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s
ORDER BY c.partition
