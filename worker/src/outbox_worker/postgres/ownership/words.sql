-- name: list_words
-- What processes last said of themselves, by the database's clock.
SELECT w.processor_id, w.token, w.pod, w.words, w.said_at,
       greatest(0, extract(epoch FROM clock_timestamp() - w.said_at))::float8 AS age_seconds,
       w.heard_until > clock_timestamp() AND NOT w.ended AS is_fresh, w.ended
FROM {schema}.processor_words AS w
WHERE %(processor_id)s::text IS NULL OR w.processor_id = %(processor_id)s
ORDER BY w.processor_id, w.said_at DESC
