-- The stored pair.
SELECT last_processed_transaction_id::text AS t, last_processed_position, stored_at,
       cursor_kind, lower_snapshot::text, upper_snapshot::text, window_position
FROM {schema}.processor_checkpoints
WHERE processor_id = %(processor_id)s AND partition = %(partition)s
