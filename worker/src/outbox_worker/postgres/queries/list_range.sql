-- The messages of a range in its order, each with its key.
SELECT b.transaction_id::text AS t, b.position, b.key
FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
ORDER BY b.n
