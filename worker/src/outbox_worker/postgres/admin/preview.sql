-- name: count_types
-- How many messages of which type the next page of a range has, and the place at the page's end, in whose order it is.
WITH page AS MATERIALIZED (
    SELECT o.transaction_id, o.position, o.message_type FROM ({rows}) AS o ORDER BY {order} LIMIT {limit}
)
SELECT coalesce(p.message_type, ''), count(*), (SELECT {place} FROM page AS o ORDER BY {backwards} LIMIT 1)
FROM page AS p
GROUP BY p.message_type
