-- name: fetch_identity
-- Which database the rows say this is, and which it is.
SELECT i.database_uuid::text, i.system_identifier::text, i.database_oid::text, i.timeline_id, i.repair_begun_at, i.rebased,
       s.system_identifier::text AS actual_system, d.oid::text AS actual_oid,
       {schema}.current_timeline() AS actual_timeline
FROM pg_control_system() AS s
CROSS JOIN pg_database AS d
LEFT JOIN {schema}.database_identity AS i ON true
WHERE d.datname = current_database()

-- name: fetch_behind
-- The highest transaction id among the rows, if this server has not reached it: a restored database. A transaction sees
-- its own rows, which its snapshot's end need not have reached.
SELECT o.{transaction_id}::text AS t, pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM (SELECT o.{transaction_id} FROM {table} AS o WHERE o.{transaction_id} IS NOT NULL
      ORDER BY o.{transaction_id} DESC LIMIT 1) AS o
WHERE o.{transaction_id} >= pg_snapshot_xmax(pg_current_snapshot())
  AND o.{transaction_id} IS DISTINCT FROM pg_current_xact_id_if_assigned()

-- name: fetch_checkpoint_ahead
-- A checkpoint that this server's counter has not reached, unless a person is asked about it already, or will be: it was
-- edited by hand.
-- A snapshot range names transactions by its snapshots: their ends are at most the server's next id.
SELECT greatest(c.last_processed_transaction_id::text::numeric,
                pg_snapshot_xmax(c.lower_snapshot)::text::numeric - 1,
                pg_snapshot_xmax(c.upper_snapshot)::text::numeric - 1)::text AS t,
       pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s
  AND c.partition = %(partition)s
  AND (c.last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot())
       OR pg_snapshot_xmax(c.lower_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
       OR pg_snapshot_xmax(c.upper_snapshot) > pg_snapshot_xmax(pg_current_snapshot()))
  AND NOT EXISTS (SELECT 1 FROM {schema}.processor_conflicts AS f
                  WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                    AND f.needs_person AND f.resolved_at IS NULL)
  AND NOT EXISTS (SELECT 1 FROM {schema}.find_tampering(c.processor_id, c.partition))
