-- name: list_schemas
-- Schemas of ours in this database: a processor of any of them may read a table.
SELECT n.nspname
FROM pg_namespace AS n
WHERE EXISTS (SELECT 1 FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'processor_checkpoints')
  AND EXISTS (SELECT 1 FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'applied_migrations')
ORDER BY n.nspname

-- name: list_superseded
-- Processors that were replaced by a swap: they never run again.
SELECT of_processor_id FROM {schema}.processor_rebuilds WHERE swapped_at IS NOT NULL

-- name: list_remote_targets
-- Processors whose messages are in another database, and in which.
SELECT processor_id, source FROM {schema}.processor_sources

-- name: prune_page
-- The next rows in the index's order, and of them those that every reader has examined, that are old enough, and of which
-- no copy is kept to be tried again: deleted, or only counted. A ctid is unique only within one partition of the table.
-- The ranges come as JSON: in a list a null would be the word NULL where array_nulls is off.
WITH page AS MATERIALIZED (
    SELECT o.tableoid AS part, o.ctid AS place, o.{transaction_id} AS t, o.{position} AS p, {moment} AS moment
    FROM {table} AS o
    WHERE (o.{transaction_id}, o.{position}) > (%(t)s::text::xid8, %(p)s::bigint)
      AND o.{transaction_id} < pg_snapshot_xmax(%(end)s::text::pg_snapshot)
    ORDER BY o.{transaction_id}, o.{position}
    LIMIT %(batch)s
), chosen AS MATERIALIZED (
    SELECT g.part, g.place FROM page AS g
    WHERE NOT EXISTS (
        SELECT 1
        FROM json_to_recordset(%(examined)s::json) AS r (lower pg_snapshot, upper pg_snapshot, place bigint)
        WHERE NOT coalesce(pg_visible_in_snapshot(g.t, r.lower), false)
          AND NOT coalesce(pg_visible_in_snapshot(g.t, r.upper) AND g.p <= r.place, false))
      AND (%(older_than)s::interval IS NULL OR g.moment < clock_timestamp() - %(older_than)s::interval)
      AND NOT EXISTS ({copies})
), gone AS (
    DELETE FROM {table} AS o
    WHERE %(delete)s AND o.ctid = ANY (ARRAY(SELECT c.place FROM chosen AS c))
      AND (o.tableoid, o.ctid) IN (SELECT c.part, c.place FROM chosen AS c)
    RETURNING 1
)
SELECT (SELECT count(*) FROM page), (SELECT count(*) FROM chosen), (SELECT count(*) FROM gone),
       l.t::text, l.p
FROM (SELECT 1) AS one LEFT JOIN LATERAL (SELECT t, p FROM page ORDER BY t DESC, p DESC LIMIT 1) AS l ON true

-- name: find_copies
-- Of one message, by its index in each table, however many others are kept: a set of rows is not looked for as a whole.
SELECT 1 FROM {schema}.held_messages AS h WHERE (h.transaction_id, h.position) = (g.t, g.p)
UNION ALL
SELECT 1 FROM {schema}.dead_letters AS d WHERE (d.transaction_id, d.position) = (g.t, g.p)
UNION ALL
SELECT 1 FROM {schema}.competing_processors AS c
CROSS JOIN LATERAL (SELECT 1 FROM {schema}.competing_retries AS r
                    WHERE r.processor_id = c.processor_id AND (r.transaction_id, r.position) = (g.t, g.p) OFFSET 0) AS r
