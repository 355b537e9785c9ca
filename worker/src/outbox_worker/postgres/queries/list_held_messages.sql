-- Held messages, those that wait for a person first; what is behind another of its key only as a number.
SELECT h.place, h.processor_id, h.partition, h.key, h.message_id, h.message_type, h.transaction_id::text AS t,
       h.position, h.attempts, h.deaths, h.error_class, h.error, h.blocks, h.held_at,
       nullif(h.next_attempt_at, 'infinity') AS next_attempt_at,
       CASE WHEN h.blocks THEN (
           SELECT count(*) FROM (SELECT 1 FROM {schema}.held_messages AS b
                                 WHERE b.processor_id = h.processor_id AND b.partition = h.partition AND b.blocks
                                   AND b.key_hash = h.key_hash AND b.key = h.key AND b.place > h.place LIMIT 1000) AS b)
       ELSE 0 END AS behind
FROM {schema}.held_messages AS h
WHERE (%(processor_id)s::text IS NULL OR h.processor_id = %(processor_id)s)
  AND (%(keys)s::text[] IS NULL OR h.key = ANY (%(keys)s::text[]))
  AND (%(message_ids)s::text[] IS NULL OR h.message_id = ANY (%(message_ids)s::text[]))
  AND NOT h.behind
  AND (NOT %(stopped)s OR h.next_attempt_at = 'infinity')
ORDER BY h.next_attempt_at DESC, h.place
LIMIT %(limit)s
