-- A checkpoint that this server's counter has not reached, unless a person is asked about it already, or will be: it was
-- edited by hand.
-- A window of the cursor Snapshot names transactions by its snapshots: their ends are at most the server's next id.
SELECT greatest(c.last_processed_transaction_id::text::numeric,
                pg_snapshot_xmax((to_jsonb(c) ->> 'lower_snapshot')::pg_snapshot)::text::numeric - 1,
                pg_snapshot_xmax((to_jsonb(c) ->> 'upper_snapshot')::pg_snapshot)::text::numeric - 1)::text AS t,
       pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s
  AND c.partition = %(partition)s
  AND (c.last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot())
       OR pg_snapshot_xmax((to_jsonb(c) ->> 'lower_snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
       OR pg_snapshot_xmax((to_jsonb(c) ->> 'upper_snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot()))
  AND NOT EXISTS (SELECT 1 FROM {schema}.processor_conflicts AS f
                  WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                    AND f.needs_person AND f.resolved_at IS NULL)
  AND NOT EXISTS (SELECT 1 FROM {schema}.find_edit(c.processor_id, c.partition))
