-- name: fetch_first
-- The first message, in reading order, of which a column is at least so much.
SELECT o.{transaction_id}::text AS t, o.{position}
FROM {table} AS o
WHERE o.{column} >= %(least)s AND o.{transaction_id} IS NOT NULL
ORDER BY o.{transaction_id}, o.{position}
LIMIT 1

-- name: fetch_lowest_scheduled
-- The lowest position of what was stored at or after the time asked for.
SELECT min(o.{position})
FROM {table} AS o
WHERE o.{scheduled} >= %(least)s AND o.{transaction_id} IS NOT NULL

-- name: fetch_lowest_unexamined
-- The oldest transaction that is still open, and below or above it the lowest pair of a message that a snapshot range leaves.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text, f.transaction_id::text, f.position
FROM (VALUES (1)) AS always
LEFT JOIN ({rows}) AS f ON true

-- name: find_processor
-- The checkpoints of a processor by which another one may start, with its partitioning, what it reads, and whether it
-- hands out batches.
SELECT c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position,
       d.partition_count, d.key, s.source,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.range_position,
       EXISTS (SELECT 1 FROM {schema}.competing_processors AS p WHERE p.processor_id = c.processor_id) AS competing
FROM {schema}.processor_checkpoints AS c
LEFT JOIN {schema}.processor_partitions AS d ON d.processor_id = c.processor_id
LEFT JOIN {schema}.processor_sources AS s ON s.processor_id = c.processor_id
WHERE c.processor_id = %(processor_id)s
ORDER BY c.partition

-- name: find_checkpoints
-- Are there checkpoints in this database, and may this role read them?
SELECT f.relation IS NOT NULL, coalesce(has_table_privilege(f.relation, 'SELECT'), false)
FROM (SELECT to_regclass(quote_ident(%(schema)s) || '.processor_checkpoints') AS relation) AS f
