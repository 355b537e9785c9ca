-- The last message of a range.
SELECT r.transaction_id::text AS t, r.position FROM ({rows}) AS r ORDER BY r.transaction_id DESC, r.position DESC LIMIT 1
