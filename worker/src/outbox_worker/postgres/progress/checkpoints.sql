-- name: fetch_checkpoint
-- The stored pair.
SELECT last_processed_transaction_id::text AS t, last_processed_position, stored_at,
       cursor_kind, lower_snapshot::text, upper_snapshot::text, range_position
FROM {schema}.processor_checkpoints
WHERE processor_id = %(processor_id)s AND partition = %(partition)s

-- name: fetch_last_move
-- By such an act messages are asked for again, or the places of all of them changed.
SELECT coalesce(max(a.id), 0)
FROM {schema}.audit_log AS a
WHERE a.processor_id = %(processor_id)s AND (a.partition = %(partition)s OR a.partition IS NULL)
  AND a.action IN ('Rewind', 'Accept', 'Rebase', 'ChangePartitions')

-- name: fetch_bound
-- The oldest transaction that is still open: everything below it is settled.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text
