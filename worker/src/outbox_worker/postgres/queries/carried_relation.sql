-- A range of the outbox of another database, in its order.
SELECT r.transaction_id, r.position, r.message_id, r.message_type, r.publication_id, r.partition_key, r.data, r.metadata,
       r.scheduled, r.deliver_after, r.key
FROM ROWS FROM (json_to_recordset({rows}::json) AS (
         transaction_id xid8, position bigint, message_id text, message_type text, publication_id text,
         partition_key text, data text, metadata text, scheduled timestamptz, deliver_after timestamptz, key text
     )) WITH ORDINALITY AS r (transaction_id, position, message_id, message_type, publication_id, partition_key, data,
                              metadata, scheduled, deliver_after, key, n)
ORDER BY r.n
