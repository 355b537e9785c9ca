-- Keys that wait for a message of theirs, those that wait for a person first.
SELECT b.key, b.partition, b.message_id, b.attempts, b.error_class, b.next_attempt_at, b.dead
FROM (
    (SELECT left(d.key, 128) AS key, d.partition, d.message_id, d.attempts, d.error_class,
            NULL::timestamptz AS next_attempt_at, true AS dead, d.id AS n
     FROM {schema}.dead_letters AS d
     WHERE d.processor_id = %(processor_id)s AND d.blocks
     ORDER BY d.id LIMIT %(limit)s)
    UNION ALL
    (SELECT left(h.key, 128), h.partition, h.message_id, h.attempts, h.error_class,
            nullif(h.next_attempt_at, 'infinity'), false, h.place
     FROM {schema}.held_messages AS h
     WHERE h.processor_id = %(processor_id)s AND h.blocks AND NOT h.behind AND h.attempts > 0
     ORDER BY h.next_attempt_at DESC, h.place LIMIT %(limit)s)
) AS b
ORDER BY b.next_attempt_at DESC NULLS FIRST, b.n
LIMIT %(limit)s
