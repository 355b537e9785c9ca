-- name: fetch_checkpoints
-- The stored pairs of a processor, of all partitions or of one.
SELECT c.partition, c.stored_at, c.last_processed_transaction_id::text AS t, c.last_processed_position,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.range_position
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s AND (%(partition)s::int IS NULL OR c.partition = %(partition)s)
ORDER BY c.partition

-- name: fetch_last_move
-- By such an act messages are asked for again, or the places of all of them changed.
SELECT coalesce(max(a.id), 0)
FROM {schema}.audit_log AS a
WHERE a.processor_id = %(processor_id)s AND (a.partition = %(partition)s OR a.partition IS NULL)
  AND a.action IN ('Rewind', 'Accept', 'Rebase', 'ChangePartitions')
