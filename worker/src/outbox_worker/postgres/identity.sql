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
-- A checkpoint, or how far consumers were handed messages, that came with a restore from a server that was further on. Either it is
-- above the transaction that wrote the row, which stays so when this server's counter has passed it; or, null, the counter has not
-- reached it. A snapshot range names transactions by its snapshots: their beginnings are at most the transaction that stores them,
-- their ends at most the server's next id. A row has 32 bits of its writer: it is the last one below the snapshot's end that has
-- these. Not one about which a person is asked already, or will be: it was edited by hand.
SELECT c.processor_id, c.partition,
       greatest(n.named, pg_snapshot_xmax(c.lower_snapshot)::text::numeric - 1,
                pg_snapshot_xmax(c.upper_snapshot)::text::numeric - 1)::text AS t,
       s.next::text AS next, CASE WHEN n.named > w.writer AND n.named < s.next THEN w.writer::text END AS writer
FROM (
    SELECT k.processor_id, k.partition, r.*
    FROM unnest(%(processor_ids)s::text[], %(partitions)s::int[]) AS k (processor_id, partition)
    CROSS JOIN LATERAL (
        SELECT c.xmin, c.last_processed_transaction_id AS t, c.lower_snapshot, c.upper_snapshot
        FROM {schema}.processor_checkpoints AS c
        WHERE c.processor_id = k.processor_id AND c.partition = k.partition
        UNION ALL
        SELECT p.xmin, NULL, p.lower_snapshot, p.upper_snapshot
        FROM generate_series(0, 9) AS g (priority)
        CROSS JOIN LATERAL (
            SELECT p.xmin, p.lower_snapshot, p.upper_snapshot FROM {schema}.competing_dispatch_positions AS p
            WHERE p.processor_id = k.processor_id AND p.priority = g.priority ORDER BY p.id DESC LIMIT 1) AS p
    ) AS r
) AS c
CROSS JOIN (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::numeric AS next) AS s
CROSS JOIN LATERAL (SELECT s.next - 1 - mod(s.next - 1 - c.xmin::text::numeric, 4294967296) AS writer) AS w
CROSS JOIN LATERAL (
    SELECT greatest(c.t, pg_snapshot_xmin(c.lower_snapshot), pg_snapshot_xmin(c.upper_snapshot))::text::numeric AS named
) AS n
WHERE (n.named > w.writer
       OR pg_snapshot_xmax(c.lower_snapshot)::text::numeric > s.next
       OR pg_snapshot_xmax(c.upper_snapshot)::text::numeric > s.next)
  AND NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS r WHERE r.processor_id = c.processor_id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.processor_conflicts AS f
                  WHERE f.processor_id = c.processor_id AND f.partition = c.partition
                    AND f.needs_person AND f.resolved_at IS NULL)
  AND NOT EXISTS (SELECT 1 FROM {schema}.find_tampering(c.processor_id, c.partition))
LIMIT 1
