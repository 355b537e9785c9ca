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
