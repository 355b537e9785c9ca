-- For each partition: are messages held that are due, does something block later messages?
SELECT p.partition,
       coalesce((SELECT min(h.next_attempt_at) <= clock_timestamp() FROM {schema}.held_messages AS h
                 WHERE h.processor_id = %(processor_id)s AND h.partition = p.partition AND NOT h.behind), false) AS due,
       EXISTS (SELECT 1 FROM {schema}.held_messages AS h
               WHERE h.processor_id = %(processor_id)s AND h.partition = p.partition AND h.blocks)
       OR EXISTS (SELECT 1 FROM {schema}.dead_letters AS d
                  WHERE d.processor_id = %(processor_id)s AND d.partition = p.partition AND d.blocks) AS blocking
FROM {schema}.processor_checkpoints AS p
WHERE p.processor_id = %(processor_id)s
