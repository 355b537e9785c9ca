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

-- name: fetch_checkpoints
-- The stored pairs of all partitions.
SELECT c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position, c.stored_at,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.range_position
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s
ORDER BY c.partition
