-- name: repair_list_outboxes
-- Tables of the schema that producers write: the default of a column is the transaction that inserts. One that is partitioned
-- stands for its partitions. With quote_all_identifiers the server quotes the function's name.
SELECT c.relname, a.attname
FROM pg_attrdef AS d
JOIN pg_class AS c ON c.oid = d.adrelid
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = d.adnum
WHERE c.relnamespace = %(schema)s::text::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND a.atttypid = 'xid8'::regtype
  AND replace(pg_get_expr(d.adbin, d.adrelid), '"', '') LIKE '%%pg_current_xact_id()%%'
ORDER BY c.relname

-- name: repair_fetch_open
-- The repair that is not finished.
SELECT r.id, r.restored_until::text, r.below::text, r.planned_by::text, r.tables
FROM {schema}.repairs AS r
WHERE r.finished_at IS NULL

-- name: repair_use_up
-- Use transaction ids up, each in a transaction of its own.
DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$

-- name: repair_find_left
-- A message at or above the bound that was not written here: restored while the repair ran.
SELECT EXISTS (SELECT 1 FROM {table} AS o
               WHERE o.{transaction_id} >= %(below)s::text::xid8
                 AND o.{transaction_id}::text::numeric > %(now)s - age(o.xmin))

-- name: repair_record_acts
-- Each checkpoint is moved by an act of a person, as a rewind is.
INSERT INTO {schema}.audit_log (action, processor_id, partition, from_transaction_id, from_position,
                                    to_transaction_id, to_position, reason, decided_by)
SELECT 'Rebase', c.processor_id, c.partition, c.before::xid8, c.position, c.after::xid8, c.position, r.reason, r.decided_by
FROM {schema}.repairs AS r CROSS JOIN ({checkpoints}) AS c
WHERE r.id = %(repair_id)s
ORDER BY c.processor_id, c.partition

-- name: repair_list_sealed
-- Snapshot ranges that pass the tamper check.
SELECT c.processor_id, c.partition
FROM {schema}.processor_checkpoints AS c
WHERE c.shadow_range IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {schema}.find_tampering(c.processor_id, c.partition))

-- name: repair_finish
WITH done AS (DELETE FROM {schema}.repair_ids AS m WHERE m.repair_id = %(repair_id)s),
finished AS (UPDATE {schema}.repairs AS r SET finished_at = clock_timestamp() WHERE r.id = %(repair_id)s)
UPDATE {schema}.database_identity SET repair_begun_at = NULL, rebased = rebased + 1

-- name: repair_find_restore
-- The last transaction that wrote what came with a restore, and whether any of it is ahead of this server: a row that names a
-- transaction above its own writer's was not written by it. The first migration's row is as old as the restore.
SELECT greatest(ahead.writer, coalesce(schema.writer, 2))::text,
       ahead.writer IS NOT NULL OR coalesce(unreached.it, false)
FROM (SELECT max(%(now)s - age(o.xmin)) AS writer FROM ({rows}) AS o (t, xmin)
      WHERE o.t::text::numeric > %(now)s - age(o.xmin)) AS ahead,
     (SELECT min(%(now)s - age(m.xmin)) AS writer FROM {schema}.applied_migrations AS m) AS schema,
     (SELECT bool_or(c.last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot())) AS it
      FROM {schema}.processor_checkpoints AS c
      WHERE NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = c.processor_id)) AS unreached

-- name: repair_count_rows
-- How many messages came with the restore, and were written here since, below the bound.
SELECT o.written_here, count(*), min(o.t::text::numeric)::text, max(o.t::text::numeric)::text
FROM (SELECT o.t::text::numeric > %(until)s AND o.t::text::numeric <= %(now)s - age(o.xmin) AS written_here, o.t
      FROM ({rows}) AS o (t, xmin)) AS o
WHERE NOT o.written_here OR o.t < %(below)s::text::xid8
GROUP BY o.written_here

-- name: repair_begin
WITH begun AS (
    INSERT INTO {schema}.repairs (restored_until, below, planned_by, tables, reason, decided_by)
    VALUES (%(until)s::text::xid8, %(below)s::text::xid8, %(now)s::text::xid8, %(tables)s, %(reason)s, %(decided_by)s)
    RETURNING id
), flagged AS (UPDATE {schema}.database_identity SET repair_begun_at = clock_timestamp())
SELECT id FROM begun

-- name: repair_plan
-- Every id that has to change, restored ones first, and the smallest ids that keep their order.
WITH found (written_here, t) AS MATERIALIZED ({found})
INSERT INTO {schema}.repair_ids (repair_id, written_here, old_transaction_id, new_transaction_id)
SELECT %(repair_id)s, f.written_here, f.t,
       CASE WHEN f.t < '3'::xid8 THEN f.t
            ELSE (2 + row_number() OVER (PARTITION BY f.t < '3'::xid8 ORDER BY f.written_here, f.t))::text::xid8 END
FROM found AS f

-- name: repair_count_pages
-- Pages of the table, or of its largest partition: what is below a page of a partitioned table, is so in each partition.
WITH RECURSIVE part (id) AS (
    SELECT %(table)s::text::regclass::oid
    UNION ALL SELECT i.inhrelid FROM part AS p JOIN pg_inherits AS i ON i.inhparent = p.id
)
SELECT coalesce(max(pg_relation_size(p.id)), 0) / current_setting('block_size')::int FROM part AS p

-- name: repair_pages
-- Some consecutive pages of the outbox, of each partition of it. Done before: rows that this repair wrote, with their ids below the bound; producers' are above.
UPDATE {table} AS o SET {transaction_id} = m.new_transaction_id
FROM {schema}.repair_ids AS m
WHERE o.ctid >= %(first)s::tid AND o.ctid < %(end)s::tid
  AND NOT (%(now)s - age(o.xmin) >= %(planned_by)s AND o.{transaction_id} < %(below)s::text::xid8)
  AND m.repair_id = %(repair_id)s
  AND m.written_here = (o.{transaction_id}::text::numeric > %(until)s
                        AND o.{transaction_id}::text::numeric <= %(now)s - age(o.xmin))
  AND m.old_transaction_id = o.{transaction_id}
  AND m.new_transaction_id <> m.old_transaction_id

-- name: repair_mapped_id
-- An expression: what becomes of an id.
(SELECT m.new_transaction_id FROM {schema}.repair_ids AS m
 WHERE m.repair_id = %(repair_id)s AND m.written_here = {written_here} AND m.old_transaction_id = {value})

-- name: repair_mapped_snapshot
-- An expression: a snapshot that sees of the mapped ids what the old one saw of the old ids. An end between two ids
-- becomes the next id.
((SELECT string_agg(coalesce(
             (SELECT m.new_transaction_id::text FROM {schema}.repair_ids AS m
              WHERE m.repair_id = %(repair_id)s AND NOT m.written_here AND m.old_transaction_id >= ends.id
              ORDER BY m.old_transaction_id LIMIT 1),
             (SELECT (max(m.new_transaction_id::text::numeric) + 1)::text FROM {schema}.repair_ids AS m
              WHERE m.repair_id = %(repair_id)s AND NOT m.written_here), '3'), ':' ORDER BY ends.id)
  FROM unnest(ARRAY[pg_snapshot_xmin({value}), pg_snapshot_xmax({value})]) AS ends (id))
 || ':' || coalesce((SELECT string_agg(m.new_transaction_id::text, ',' ORDER BY m.new_transaction_id)
                     FROM pg_snapshot_xip({value}) AS open (id)
                     JOIN {schema}.repair_ids AS m ON m.repair_id = %(repair_id)s AND NOT m.written_here
                      AND m.old_transaction_id = open.id), ''))::pg_snapshot

-- name: repair_mapped_array
-- An expression: what becomes of a list of ids.
(SELECT array_agg(coalesce(m.new_transaction_id, e.id) ORDER BY e.number)
 FROM unnest({value}) WITH ORDINALITY AS e (id, number)
 LEFT JOIN {schema}.repair_ids AS m
   ON m.repair_id = %(repair_id)s AND NOT m.written_here AND m.old_transaction_id = e.id)

-- name: repair_count_ids
-- How many ids change, the highest new one, and the highest old one that came with the restore.
SELECT count(*), coalesce(max(m.new_transaction_id::text::numeric), 0)::text,
       coalesce(max(m.old_transaction_id::text::numeric) FILTER (WHERE NOT m.written_here), 0)::text
FROM {schema}.repair_ids AS m
WHERE m.repair_id = %(repair_id)s

-- name: repair_list_checkpoints
-- Each checkpoint as it is and as it will be.
SELECT c.processor_id, c.partition, c.last_processed_transaction_id::text AS before, c.last_processed_position AS position,
       coalesce(m.new_transaction_id, c.last_processed_transaction_id)::text AS after
FROM {schema}.processor_checkpoints AS c
LEFT JOIN {schema}.repair_ids AS m
  ON m.repair_id = %(repair_id)s AND m.old_transaction_id = c.last_processed_transaction_id
 AND m.written_here = {written_here}
WHERE NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = c.processor_id)
ORDER BY c.processor_id, c.partition

-- name: repair_list_columns
-- Where the schema keeps transaction ids and snapshots besides the messages themselves and the history of people's acts, and
-- whether each row there is a processor's: one that reads another database names that one's ids. A partition's rows are mapped
-- with its table: twice would be wrong.
SELECT c.relname, a.attname, replace(a.atttypid::regtype::text, '"', ''),
       EXISTS (SELECT 1 FROM pg_attribute AS p
               WHERE p.attrelid = c.oid AND p.attname = 'processor_id' AND NOT p.attisdropped)
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = %(schema)s::text::regnamespace AND c.relkind IN ('r', 'p')
  AND NOT c.relispartition AND c.relname NOT IN ('repairs', 'repair_ids', 'audit_log')
  AND NOT (c.oid = ANY (%(messages)s::text[]::regclass[]))
  AND a.atttypid IN ('xid8'::regtype, 'pg_snapshot'::regtype, 'xid8[]'::regtype)
ORDER BY c.relname, a.attnum

-- name: repair_list_others
-- Tables elsewhere that look like an outbox: the default of a column is the transaction that inserts.
SELECT format('%%I.%%I', n.nspname, c.relname)
FROM pg_attrdef AS d
JOIN pg_class AS c ON c.oid = d.adrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE replace(pg_get_expr(d.adbin, d.adrelid), '"', '') LIKE '%%pg_current_xact_id()%%'
  AND NOT c.relispartition AND n.oid <> %(schema)s::text::regnamespace
  AND NOT (c.oid = ANY (%(messages)s::text[]::regclass[]))
ORDER BY 1

-- name: repair_lock_owners
-- Until this transaction ends no process becomes an owner, and no consumer is handed a batch: they look at the flag behind these
-- locks. A transaction that has one of them now is waited for.
LOCK TABLE {schema}.processor_leases, {schema}.competing_processors, {schema}.competing_batches IN EXCLUSIVE MODE

-- name: repair_hand_back
-- A frozen consumer whose lease is over shall not complete its batch when it wakes: it would read the range of its old ids, find
-- nothing there, and take all of it for done.
UPDATE {schema}.competing_batches AS b SET owner = NULL, pod = NULL, expires_at = '-infinity' WHERE b.owner IS NOT NULL

-- name: repair_lock_leases
-- No process may become an owner before this transaction ends; which one is already?
SELECT l.processor_id, l.partition, l.pod, l.expires_at > clock_timestamp()
FROM {schema}.processor_leases AS l
ORDER BY l.processor_id, l.partition
FOR UPDATE

-- name: repair_lock_consumers
-- Nothing is handed out before this transaction ends: see lock_dispatch_positions().
SELECT p.processor_id FROM {schema}.competing_processors AS p ORDER BY p.processor_id FOR UPDATE

-- name: repair_list_consumers
-- Live consumers of mode Competing, which have no lease on their processor: members, or with a batch in hand.
SELECT m.processor_id, m.pod
FROM {schema}.processor_members AS m JOIN {schema}.competing_processors AS p USING (processor_id)
WHERE m.expires_at > clock_timestamp()
UNION
SELECT b.processor_id, b.pod FROM {schema}.competing_batches AS b
WHERE b.owner IS NOT NULL AND b.expires_at > clock_timestamp()
ORDER BY 1, 2

-- name: repair_is_ours
-- An expression: the row is of a processor that reads this database.
NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = {row}.processor_id)
