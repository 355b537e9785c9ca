-- name: fetch_partitions
-- The partitioning of the processor, if it has one, and what that changes to.
SELECT d.partition_count, d.key, d.next_count, d.barrier_transaction_id::text AS t, d.barrier_position,
       d.barrier_mark::text AS mark, d.barrier_snapshot::text AS snapshot
FROM {schema}.processor_partitions AS d
WHERE d.processor_id = %(processor_id)s

-- name: fetch_owners
-- How many partitions the processor has, its live processes, the oldest first, and its live leases.
SELECT (SELECT d.partition_count FROM {schema}.processor_partitions AS d WHERE d.processor_id = %(processor_id)s),
       ARRAY(SELECT m.token
             FROM {schema}.processor_members AS m
             WHERE m.processor_id = %(processor_id)s AND m.claim_uid = %(claim_uid)s AND m.expires_at > clock_timestamp()
             ORDER BY m.joined_at, m.token),
       (SELECT json_agg(json_build_array(l.partition, l.token, l.epoch, l.pod) ORDER BY l.partition)
        FROM {schema}.processor_leases AS l
        WHERE l.processor_id = %(processor_id)s AND l.expires_at > clock_timestamp())

-- name: fetch_obstacles
-- What stops a change of the number of partitions, apart from messages that are not handled yet: conflicts that wait for
-- a person, and in each partition the first message that blocks its key: held after it failed, or a dead letter.
(SELECT f.partition, NULL::text AS message_id, NULL::text AS key, NULL::text AS error, max(f.id) AS conflict
 FROM {schema}.processor_conflicts AS f
 WHERE f.processor_id = %(processor_id)s AND f.needs_person AND f.resolved_at IS NULL
 GROUP BY f.partition)
UNION ALL
(SELECT DISTINCT ON (m.partition) m.partition, m.message_id, m.key, left(coalesce(m.error, m.error_class), 200), NULL
 FROM (SELECT h.partition, h.place, h.message_id, h.key, h.error, h.error_class
       FROM {schema}.held_messages AS h
       WHERE h.processor_id = %(processor_id)s AND h.blocks AND h.error_class IS NOT NULL
       UNION ALL
       SELECT l.partition, l.place, l.message_id, l.key, l.error, l.error_class
       FROM {schema}.dead_letters AS l
       WHERE l.processor_id = %(processor_id)s AND l.blocks) AS m
 ORDER BY m.partition, m.place)
ORDER BY 1
LIMIT 8
