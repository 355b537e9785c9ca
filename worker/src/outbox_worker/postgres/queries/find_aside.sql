-- Of a range the messages that are not to be handled now: their time has not come, they are held already, or an earlier
-- message of their key is held or dead. Asked only where something is held or delayed.
SELECT b.transaction_id::text AS t, b.position
FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
WHERE b.deliver_after > clock_timestamp()
   OR EXISTS (SELECT 1 FROM {schema}.held_messages AS h
              WHERE h.processor_id = {processor_id} AND h.partition = {partition}
                AND h.transaction_id = b.transaction_id AND h.position = b.position)
   OR EXISTS (SELECT 1 FROM {schema}.held_messages AS h
              WHERE h.processor_id = {processor_id} AND h.partition = {partition} AND h.blocks
                AND h.key_hash = hashtextextended(b.key, 0) AND h.key = b.key)
   OR EXISTS (SELECT 1 FROM {schema}.dead_letters AS d
              WHERE d.processor_id = {processor_id} AND d.partition = {partition} AND d.blocks
                AND d.key_hash = hashtextextended(b.key, 0) AND d.key = b.key)
ORDER BY b.n
