-- name: list_statuses
-- What processes last said of themselves, by the database's clock.
SELECT w.processor_id, w.token, w.pod, w.statuses, w.stored_at,
       greatest(0, extract(epoch FROM clock_timestamp() - w.stored_at))::float8 AS age_seconds,
       w.expires_at > clock_timestamp() AND NOT w.ended AS is_fresh, w.ended
FROM {schema}.process_statuses AS w
WHERE %(processor_id)s::text IS NULL OR w.processor_id = %(processor_id)s
ORDER BY w.processor_id, w.stored_at DESC
