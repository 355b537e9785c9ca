-- name: examine_cut
-- How far a batch of at most so many matching messages reaches in a window, how many it has, the unique keys that it frees, and what
-- of it is not due yet. Rows behind the last match that do not match are examined too.
WITH examined AS MATERIALIZED ({rows}),
numbered AS (
    SELECT e.transaction_id, e.position,
           row_number() OVER in_order AS n,
           count(*) FILTER (WHERE e.matches AND e.due) OVER in_order AS matched
    FROM examined AS e
    WINDOW in_order AS (ORDER BY e.transaction_id, e.position ROWS UNBOUNDED PRECEDING)
)
SELECT c.transaction_id::text AS t, c.position, c.n, c.matched,
       (SELECT array_agg(k.unique_key) FROM examined AS k
        WHERE k.unique_key IS NOT NULL AND (k.transaction_id, k.position) <= (c.transaction_id, c.position)),
       (SELECT array_agg(d.position) FROM examined AS d
        WHERE d.matches AND NOT d.due AND (d.transaction_id, d.position) <= (c.transaction_id, c.position))
FROM numbered AS c
WHERE c.matched <= {limit}
ORDER BY c.n DESC
LIMIT 1

-- name: copied_rows
-- Messages of a window that are kept for when their time has come.
ARRAY(SELECT ROW({processor_id}, d.transaction_id, d.position, d.message_id, d.message_type, d.publication_id,
                 d.partition_key, d.data, d.metadata, d.scheduled, d.deliver_after)::{schema}.competing_copies
      FROM ({rows}) AS d WHERE d.position = ANY ({positions}::bigint[]))

-- name: fetch_attempts
-- How often messages of a queue have failed before, of those that have.
SELECT a.transaction_id::text, a.position, a.attempts FROM ({rows}) AS a WHERE a.attempts > 0
