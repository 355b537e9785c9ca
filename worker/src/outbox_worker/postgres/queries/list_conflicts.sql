-- Refusals with what was decided about them, the latest first.
SELECT f.*
FROM {schema}.processor_conflicts AS f
WHERE (%(processor_id)s::text IS NULL OR f.processor_id = %(processor_id)s)
  AND (%(conflict_id)s::bigint IS NULL OR f.id = %(conflict_id)s)
  AND (%(resolved)s OR (f.needs_person AND f.resolved_at IS NULL))
ORDER BY f.id DESC
LIMIT %(limit)s
