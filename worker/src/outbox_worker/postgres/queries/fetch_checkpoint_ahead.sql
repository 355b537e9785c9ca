-- A checkpoint that this server's counter has not reached, unless a person is asked about it already.
SELECT c.last_processed_transaction_id::text AS t, pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s
  AND c.partition = %(partition)s
  AND c.last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot())
  AND NOT EXISTS (SELECT 1 FROM {schema}.processor_conflicts AS f
                  WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                    AND f.needs_person AND f.resolved_at IS NULL)
