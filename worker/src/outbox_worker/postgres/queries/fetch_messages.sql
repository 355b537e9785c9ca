-- The next messages of a processor without a filter on types, payloads as text. The order is that of the columns, never
-- of an output that is cast to text.
SELECT o.transaction_id::text AS t, o.position, o.message_id, o.message_type, o.publication_id, o.partition_key, o.data,
       o.metadata, o.scheduled, o.deliver_after
FROM ({rows}) AS o
ORDER BY o.transaction_id, o.position
