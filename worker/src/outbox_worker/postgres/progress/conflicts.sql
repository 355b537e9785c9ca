-- name: count_conflicts
-- How often which code was told, also where the row is gone by now.
SELECT told.code, sum(told.count)::bigint
FROM (SELECT f.code, count(*) FROM {schema}.processor_conflicts AS f WHERE f.processor_id = %(processor_id)s GROUP BY f.code
      UNION ALL
      SELECT p.code, p.count FROM {schema}.pruned_conflicts AS p WHERE p.processor_id = %(processor_id)s) AS told
GROUP BY told.code
ORDER BY told.code

-- name: fetch_conflicts
-- The last conflict, and the last one that waits for a person.
(SELECT f.* FROM {schema}.processor_conflicts AS f
 WHERE f.processor_id = %(processor_id)s
 ORDER BY f.id DESC LIMIT 1)
UNION
(SELECT f.* FROM {schema}.processor_conflicts AS f
 WHERE f.processor_id = %(processor_id)s AND f.needs_person AND f.resolved_at IS NULL
 ORDER BY f.id DESC LIMIT 1)
ORDER BY id

-- name: fetch_open_conflict
-- The last conflict of one partition that waits for a person.
SELECT f.*
FROM {schema}.processor_conflicts AS f
WHERE f.processor_id = %(processor_id)s AND f.partition = %(partition)s AND f.needs_person AND f.resolved_at IS NULL
ORDER BY f.id DESC
LIMIT 1

-- name: fetch_moved_from
-- The pair that the last rewind of one partition found.
SELECT a.from_transaction_id::text, a.from_position
FROM {schema}.audit_log AS a
WHERE a.processor_id = %(processor_id)s AND a.partition = %(partition)s AND a.action = 'Rewind'
ORDER BY a.id DESC
LIMIT 1
