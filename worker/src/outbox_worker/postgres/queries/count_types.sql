-- How many messages of which type the next page of a range has, and the pair at the page's end.
WITH page AS MATERIALIZED (
    SELECT o.transaction_id, o.position, o.message_type
    FROM ({rows}) AS o
    ORDER BY o.transaction_id, o.position
    LIMIT %(limit)s
)
SELECT coalesce(p.message_type, ''), count(*),
       (SELECT l.transaction_id::text || ':' || l.position FROM page AS l
        ORDER BY l.transaction_id DESC, l.position DESC LIMIT 1)
FROM page AS p
GROUP BY p.message_type
