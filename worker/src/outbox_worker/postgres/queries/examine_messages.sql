-- How far a batch of at most so many matching messages reaches, looking at a bounded window: nothing is shipped but the
-- last pair and the counts. Rows behind the last match that do not match are examined too.
WITH examined AS MATERIALIZED ({rows}),
numbered AS (
    SELECT e.transaction_id, e.position,
           row_number() OVER in_order AS n,
           count(*) FILTER (WHERE e.matches) OVER in_order AS matched,
           count(*) FILTER (WHERE e.matches AND e.delayed) OVER in_order AS delayed
    FROM examined AS e
    WINDOW in_order AS (ORDER BY e.transaction_id, e.position ROWS UNBOUNDED PRECEDING)
)
SELECT c.transaction_id::text AS t, c.position, c.n, c.matched, c.delayed
FROM numbered AS c
WHERE c.matched <= %(limit)s
ORDER BY c.n DESC
LIMIT 1
