-- What stops a change of the number of partitions, apart from messages that are not handled yet: conflicts that wait for
-- a person, and in each partition the first held message that failed.
(SELECT f.partition, NULL::text AS message_id, NULL::text AS key, NULL::text AS error, max(f.id) AS conflict
 FROM {schema}.processor_conflicts AS f
 WHERE f.processor_id = %(processor_id)s AND f.needs_person AND f.resolved_at IS NULL
 GROUP BY f.partition)
UNION ALL
(SELECT DISTINCT ON (m.partition) m.partition, m.message_id, m.key, left(coalesce(m.error, m.error_class), 200), NULL
 FROM {schema}.held_messages AS m
 WHERE m.processor_id = %(processor_id)s AND m.error_class IS NOT NULL
 ORDER BY m.partition, m.transaction_id, m.position)
ORDER BY 1
LIMIT 8
