-- The first message of a range, as a person knows it.
SELECT b.transaction_id::text AS t, b.position, b.message_id, b.message_type, b.key
FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
ORDER BY b.n
LIMIT 1
