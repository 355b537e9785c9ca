-- name: fetch_superseding
-- Which processor replaced this one.
SELECT r.processor_id
FROM {schema}.processor_rebuilds AS r
WHERE r.of_processor_id = %(processor_id)s AND r.swapped_at IS NOT NULL

-- name: find_coverage
-- The checkpoints of a processor, all or all but one partition's, with the same in words that `supersede_processor` compares.
SELECT {schema}.coverage_of(%(processor_id)s, %(but_partition)s::int),
       EXISTS (SELECT 1 FROM {schema}.competing_processors AS p WHERE p.processor_id = c.processor_id),
       c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.range_position
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s AND c.partition IS DISTINCT FROM %(but_partition)s::int
ORDER BY c.partition

-- name: count_unhandled
-- Messages that the checkpoint has passed and that are not handled: held ones, and dead letters that block their keys.
SELECT (SELECT count(*) FROM {schema}.held_messages AS m WHERE m.processor_id = %(processor_id)s),
       (SELECT count(*) FROM {schema}.dead_letters AS m WHERE m.processor_id = %(processor_id)s AND m.blocks)

-- name: stand_still
-- Wait until the processor's transactions are over, and let none begin before ours ends: each of them holds this lock,
-- shared, under the epoch of its lease, before it locks anything else.
SELECT pg_advisory_xact_lock(
    hashtext('outbox ' || %(schema)s || ' ' || l.processor_id || ' ' || l.partition), (l.epoch & 2147483647)::int)
FROM {schema}.processor_leases AS l
WHERE l.processor_id = %(processor_id)s
ORDER BY l.partition

-- name: list_rebuilds
-- Which processor replaces which, with both checkpoints; of a partitioned one the furthest.
WITH furthest AS (
    SELECT DISTINCT ON (c.processor_id) c.processor_id, c.last_processed_transaction_id::text AS t,
           c.last_processed_position AS p
    FROM {schema}.processor_checkpoints AS c
    ORDER BY c.processor_id, c.last_processed_transaction_id DESC, c.last_processed_position DESC
)
SELECT r.processor_id, r.of_processor_id, r.begun_at, r.swapped_at,
       n.t AS new_t, n.p AS new_p, o.t AS old_t, o.p AS old_p
FROM {schema}.processor_rebuilds AS r
LEFT JOIN furthest AS n ON n.processor_id = r.processor_id
LEFT JOIN furthest AS o ON o.processor_id = r.of_processor_id
WHERE %(processor_id)s::text IS NULL OR r.processor_id = %(processor_id)s OR r.of_processor_id = %(processor_id)s
ORDER BY r.begun_at, r.processor_id
