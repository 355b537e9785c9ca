-- name: name_message
-- The first message of a range, as a person knows it.
SELECT b.transaction_id::text AS t, b.position, b.message_id, b.message_type, b.key
FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
ORDER BY b.n
LIMIT 1

-- name: record_giving_up
-- Write down that a person gives up the message at which a processor stands: the worker makes it a dead letter.
INSERT INTO {schema}.audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
VALUES ('GiveUp', %(processor_id)s, %(partition)s, %(transaction_id)s::xid8, %(position)s, %(reason)s, %(decided_by)s)

-- name: find_giving_up
-- Has a person given up the message at this place? A rewind since then asks for it again.
SELECT EXISTS (
    SELECT 1 FROM {schema}.audit_log AS a
    WHERE a.action = 'GiveUp' AND a.processor_id = %(processor_id)s AND a.partition = %(partition)s
      AND a.to_transaction_id = %(transaction_id)s::xid8 AND a.to_position = %(position)s
      AND NOT EXISTS (SELECT 1 FROM {schema}.audit_log AS r
                      WHERE r.action = 'Rewind' AND r.processor_id = a.processor_id AND r.partition = a.partition
                        AND r.id > a.id))
