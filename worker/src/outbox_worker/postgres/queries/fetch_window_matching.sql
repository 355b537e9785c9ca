-- The messages of a span that pass the filter on types, payloads as text.
SELECT p.*
FROM ({rows}) AS p
ORDER BY p.position
