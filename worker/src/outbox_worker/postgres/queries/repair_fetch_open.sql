-- The repair that is not finished.
SELECT r.id, r.restored_until::text, r.below::text, r.planned_by::text, r.tables
FROM {schema}.repairs AS r
WHERE r.finished_at IS NULL
