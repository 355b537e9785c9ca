-- The messages of a range in its order, each with its key and whether it is not to be handled now: its time has not come,
-- it is held already, or an earlier message of its key is held or dead. No payload travels.
SELECT b.transaction_id::text AS t, b.position, b.key,
       coalesce(b.deliver_after > clock_timestamp(), false)
       OR EXISTS (SELECT 1 FROM {schema}.held_messages AS h
                  WHERE h.processor_id = {processor_id} AND h.partition = {partition}
                    AND h.transaction_id = b.transaction_id AND h.position = b.position)
       OR EXISTS (SELECT 1 FROM {schema}.held_messages AS h
                  WHERE h.processor_id = {processor_id} AND h.partition = {partition} AND h.blocks
                    AND h.key_hash = hashtextextended(b.key, 0) AND h.key = b.key)
       OR EXISTS (SELECT 1 FROM {schema}.dead_letters AS d
                  WHERE d.processor_id = {processor_id} AND d.partition = {partition} AND d.blocks
                    AND d.key_hash = hashtextextended(b.key, 0) AND d.key = b.key) AS aside
FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
ORDER BY b.n
