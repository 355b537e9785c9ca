-- name: count_types
-- How many messages of which type the next page of a range has, and the pair at the page's end.
WITH page AS MATERIALIZED (
    SELECT o.transaction_id, o.position, o.message_type
    FROM ({rows}) AS o
    ORDER BY o.transaction_id, o.position
    LIMIT {limit}
)
SELECT coalesce(p.message_type, ''), count(*),
       (SELECT l.transaction_id::text || ':' || l.position FROM page AS l
        ORDER BY l.transaction_id DESC, l.position DESC LIMIT 1)
FROM page AS p
GROUP BY p.message_type

-- name: count_types_by_position
-- How many messages of which type the next page of a snapshot range has, and the page's last position.
WITH page AS MATERIALIZED (
    SELECT o.position, o.message_type
    FROM ({rows}) AS o
    ORDER BY o.position
    LIMIT {limit}
)
SELECT coalesce(p.message_type, ''), count(*), (SELECT max(l.position) FROM page AS l)
FROM page AS p
GROUP BY p.message_type
