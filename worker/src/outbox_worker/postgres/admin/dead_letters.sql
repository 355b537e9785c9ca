-- name: list_dead_letters
-- What is shown of dead letters, in the order in which they died.
SELECT d.id, d.processor_id, d.partition, d.key, d.message_id, d.message_type, d.transaction_id::text AS t, d.position,
       d.attempts, d.error_class, d.error, d.blocks, d.died_at, CASE WHEN %(payload)s THEN d.data END AS data,
       CASE WHEN d.blocks THEN (
           SELECT count(*) FROM (SELECT 1 FROM {schema}.held_messages AS h
                                 WHERE h.processor_id = d.processor_id AND h.partition = d.partition AND h.blocks
                                   AND h.key_hash = d.key_hash AND h.key = d.key LIMIT 1000) AS h)
       ELSE 0 END AS behind
FROM {schema}.dead_letters AS d
WHERE d.id = ANY (%(numbers)s::bigint[])
ORDER BY d.id

-- name: find_dead_letters
-- The numbers of the dead letters that all given filters let through, in the order in which they died.
SELECT d.id
FROM {schema}.dead_letters AS d
WHERE (%(processor_id)s::text IS NULL OR d.processor_id = %(processor_id)s)
  AND (%(ids)s::bigint[] IS NULL OR d.id = ANY (%(ids)s::bigint[]))
  AND (%(keys)s::text[] IS NULL OR d.key = ANY (%(keys)s::text[]))
  AND (%(message_ids)s::text[] IS NULL OR d.message_id = ANY (%(message_ids)s::text[]))
  AND (%(types)s::text[] IS NULL OR d.message_type = ANY (%(types)s::text[]))
  AND (%(classes)s::text[] IS NULL OR d.error_class = ANY (%(classes)s::text[]))
  AND (%(text)s::text IS NULL OR position(lower(%(text)s::text) IN lower(d.error)) > 0)
  AND (%(since)s::timestamptz IS NULL OR d.died_at >= %(since)s::timestamptz)
  AND (%(until)s::timestamptz IS NULL OR d.died_at < %(until)s::timestamptz)
ORDER BY d.id
LIMIT %(limit)s

-- name: list_held_messages
-- Held messages, those that wait for a person first; what is behind another of its key only as a number, unless it is asked for
-- by its id. Such a message has no time of its own.
SELECT h.place, h.processor_id, h.partition, h.key, h.message_id, h.message_type, h.transaction_id::text AS t,
       h.position, h.attempts, h.crash_count, h.error_class, h.error, h.blocks, h.held_at,
       CASE WHEN NOT h.behind THEN nullif(h.next_attempt_at, 'infinity') END AS next_attempt_at,
       CASE WHEN h.blocks THEN (
           SELECT count(*) FROM (SELECT 1 FROM {schema}.held_messages AS b
                                 WHERE b.processor_id = h.processor_id AND b.partition = h.partition AND b.blocks
                                   AND b.key_hash = h.key_hash AND b.key = h.key AND b.place > h.place LIMIT 1000) AS b)
       ELSE 0 END AS behind, h.behind AS is_behind
FROM {schema}.held_messages AS h
WHERE (%(processor_id)s::text IS NULL OR h.processor_id = %(processor_id)s)
  AND (%(keys)s::text[] IS NULL OR h.key = ANY (%(keys)s::text[]))
  AND (%(message_ids)s::text[] IS NULL OR h.message_id = ANY (%(message_ids)s::text[]))
  AND (NOT h.behind OR %(message_ids)s::text[] IS NOT NULL)
  AND (NOT %(stopped)s OR h.next_attempt_at = 'infinity' AND NOT h.behind)
ORDER BY h.next_attempt_at DESC, h.place
LIMIT %(limit)s
