-- How far a batch of at most so many matching messages reaches inside a window, looking at a bounded page; nothing is
-- shipped but the last position and the counts. Rows behind the last match that do not match are examined too.
-- `reached`: as in fetch_window_rows.
WITH {found},
numbered AS (
    SELECT e.position,
           row_number() OVER in_order AS n,
           count(*) FILTER (WHERE e.matches) OVER in_order AS matched,
           count(*) FILTER (WHERE e.matches AND e.delayed) OVER in_order AS delayed
    FROM ({rows}) AS e
    WINDOW in_order AS (ORDER BY e.position ROWS UNBOUNDED PRECEDING)
)
SELECT s.looked_at, c.position, c.n, c.matched, c.delayed, s.rows,
       CASE WHEN s.rows < {size} THEN ({ahead}) END AS reached
FROM (SELECT (SELECT count(*) FROM found) AS looked_at, (SELECT count(*) FROM numbered) AS rows) AS s
LEFT JOIN LATERAL (SELECT e.* FROM numbered AS e WHERE e.matched <= %(limit)s ORDER BY e.n DESC LIMIT 1) AS c ON true
