-- How many messages of which type the next page of a window has, and the page's last position.
WITH page AS MATERIALIZED (
    SELECT o.position, o.message_type
    FROM ({rows}) AS o
    ORDER BY o.position
    LIMIT %(limit)s
)
SELECT coalesce(p.message_type, ''), count(*), (SELECT max(l.position) FROM page AS l)
FROM page AS p
GROUP BY p.message_type
