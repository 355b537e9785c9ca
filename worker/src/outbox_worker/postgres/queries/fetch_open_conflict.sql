-- The last conflict of one partition that waits for a person.
SELECT f.*
FROM {schema}.processor_conflicts AS f
WHERE f.processor_id = %(processor_id)s AND f.partition = %(partition)s AND f.needs_person AND f.resolved_at IS NULL
ORDER BY f.id DESC
LIMIT 1
