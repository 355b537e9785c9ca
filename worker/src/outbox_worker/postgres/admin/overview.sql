-- name: list_processors
-- Every processor and partition that the database has heard of: who claims it, who works on it, how far it is, and the
-- conflict that waits for a person.
WITH known AS (
    SELECT c.processor_id, c.partition FROM {schema}.processor_checkpoints AS c
    UNION
    SELECT l.processor_id, l.partition FROM {schema}.processor_leases AS l
    UNION
    SELECT f.processor_id, f.partition FROM {schema}.processor_conflicts AS f
    UNION
    SELECT m.processor_id, 0 FROM {schema}.processor_claims AS m
    WHERE NOT EXISTS (SELECT 1 FROM {schema}.processor_leases AS l WHERE l.processor_id = m.processor_id)
)
SELECT k.processor_id, k.partition,
       m.cluster, m.namespace, m.name, m.uid, m.claimed_at, m.vacated_at,
       d.partition_count, d.key, d.next_count, d.barrier_transaction_id::text AS barrier_transaction_id, d.barrier_position,
       d.barrier_mark::text AS barrier_mark, d.barrier_snapshot::text AS barrier_snapshot,
       l.epoch, l.token, l.pod, l.expires_at, coalesce(l.expires_at > clock_timestamp(), false) AS live,
       c.last_processed_transaction_id::text AS transaction_id, c.last_processed_position AS "position", c.stored_at,
       c.cursor_kind, c.lower_snapshot::text AS lower, c.upper_snapshot::text AS upper, c.range_position,
       c.processor_id IS NULL AND EXISTS (
           SELECT 1 FROM {schema}.shadow_checkpoints AS s
           WHERE s.processor_id = k.processor_id AND s.partition = k.partition) AS is_gone,
       (SELECT count(*) FROM {schema}.processor_conflicts AS f
        WHERE f.processor_id = k.processor_id AND f.partition = k.partition) AS conflicts,
       (SELECT max(f.id) FROM {schema}.processor_conflicts AS f
        WHERE f.processor_id = k.processor_id AND f.partition = k.partition
          AND f.needs_person AND f.resolved_at IS NULL) AS open_conflict
FROM known AS k
LEFT JOIN {schema}.processor_partitions AS d ON d.processor_id = k.processor_id
LEFT JOIN {schema}.processor_claims AS m ON m.processor_id = k.processor_id
LEFT JOIN {schema}.processor_leases AS l ON l.processor_id = k.processor_id AND l.partition = k.partition
LEFT JOIN {schema}.processor_checkpoints AS c ON c.processor_id = k.processor_id AND c.partition = k.partition
WHERE (%(processor_id)s::text IS NULL OR k.processor_id = %(processor_id)s)
  AND (d.partition_count IS NULL OR k.partition < d.partition_count)  -- leases of partitions that are no more keep their rows
ORDER BY k.processor_id, k.partition

-- name: list_conflicts
-- Refusals with what was decided about them, the latest first.
SELECT f.*
FROM {schema}.processor_conflicts AS f
WHERE (%(processor_id)s::text IS NULL OR f.processor_id = %(processor_id)s)
  AND (%(conflict_id)s::bigint IS NULL OR f.id = %(conflict_id)s)
  AND (%(resolved)s OR (f.needs_person AND f.resolved_at IS NULL))
ORDER BY f.id DESC
LIMIT %(limit)s

-- name: list_audit_log
-- What people decided, the latest first.
SELECT a.id, a.action, a.processor_id, a.partition, a.from_transaction_id::text AS from_transaction_id, a.from_position,
       a.to_transaction_id::text AS to_transaction_id, a.to_position, a.reason, a.decided_by, a.session_role, a.decided_at
FROM {schema}.audit_log AS a
WHERE %(processor_id)s::text IS NULL OR a.processor_id = %(processor_id)s
ORDER BY a.id DESC
LIMIT %(limit)s

-- name: record_audit_entry
-- Write down what a person decided, where no function of the schema does.
INSERT INTO {schema}.audit_log (action, processor_id, reason, decided_by)
VALUES (%(action)s, %(processor_id)s, %(reason)s, %(decided_by)s)
