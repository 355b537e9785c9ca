-- name: fetch_page
-- A page of a snapshot range, and how many candidates were looked at: more than a cap, and the page is not the range's first.
-- Of a page that is not full: the position up to which all was looked at, if the range may go on behind it. One statement,
-- so one snapshot: with two, what others commit or delete between them would make the position that of other rows. Beside the
-- first message: where all messages of the range are, if it has more than a page of them.
WITH {found},
page AS MATERIALIZED ({rows})
SELECT s.looked_at, r.reached, CASE WHEN p.position = (SELECT min(f.position) FROM page AS f) THEN ({listed}) END AS listed,
       p.transaction_id, p.position, p.message_id, p.message_type, p.publication_id, p.partition_key,
       {payload}, p.scheduled, p.deliver_after
FROM (SELECT count(*) AS looked_at FROM found) AS s
CROSS JOIN (SELECT CASE WHEN (SELECT count(*) FROM page) < {size} THEN ({ahead}) END AS reached) AS r
LEFT JOIN page AS p ON true
ORDER BY p.position

-- name: look_along
-- Where the messages of each partition are along the positions, with their transaction ids; of how many rows, up to where, and as
-- which snapshot sees it.
SELECT pg_current_snapshot()::text, r.partition, count(*), max(r.position),
       (array_agg(r.position) FILTER (WHERE r.wanted))::text, (array_agg(r.transaction_id) FILTER (WHERE r.wanted))::text,
       (array_agg(r.position) FILTER (WHERE r.wanted AND r.delayed))::text
FROM ({rows}) AS r
GROUP BY r.partition

-- name: fetch_beginning
-- The position of a range's first message; of all that is committed and a lower snapshot does not see, as which snapshot sees it.
WITH {found}
SELECT pg_current_snapshot()::text, (SELECT r.position FROM ({rows}) AS r)

-- name: examine_page
-- How far a page of a snapshot range reaches, where no filter on types lets only some through: nothing is shipped but the
-- last position and the counts, and where looking for the rows again would take long, their positions. `reached` and at last the
-- positions of the whole range: as in fetch_page.
WITH {found}
SELECT s.looked_at, s.position, s.rows, s.rows, s.delayed, s.rows,
       CASE WHEN s.rows < {size} THEN ({ahead}) END AS reached, s.positions, ({listed})
FROM (SELECT (SELECT count(*) FROM found) AS looked_at, max(e.position) AS position, count(*) AS rows,
             count(*) FILTER (WHERE e.delayed) AS delayed, {positions} AS positions
      FROM ({rows}) AS e) AS s

-- name: examine_filtered_page
-- How far a batch of at most so many matching messages reaches inside a snapshot range, looking at a bounded page; nothing is
-- shipped but the last position and the counts. It ends with its last match, behind which no row is read (the page counts as
-- full then), or else with the last row. `reached`: as in fetch_page.
WITH {found}
SELECT s.looked_at, c.position, c.n, c.matched, c.delayed, r.rows,
       CASE WHEN r.rows < {size} THEN ({ahead}) END AS reached, NULL, NULL
FROM (SELECT count(*) AS looked_at FROM found) AS s
LEFT JOIN (
    SELECT p.*
    FROM (SELECT e.position, e.matches,
                 row_number() OVER in_order AS n,
                 count(*) FILTER (WHERE e.matches) OVER in_order AS matched,
                 count(*) FILTER (WHERE e.matches AND e.delayed) OVER in_order AS delayed,
                 lead(e.position) OVER in_order IS NULL AS is_last
          FROM ({rows}) AS e
          WINDOW in_order AS (ORDER BY e.position ROWS UNBOUNDED PRECEDING)) AS p
    WHERE p.is_last OR (p.matches AND p.matched = {most})
    ORDER BY p.position
    LIMIT 1
) AS c ON true
CROSS JOIN LATERAL (SELECT CASE WHEN c.is_last THEN c.n WHEN c.n IS NULL THEN 0 ELSE {size} END AS rows) AS r

-- name: fetch_snapshot
-- What is over and what is in progress, now; whether this is a standby, which cannot tell; and whether nothing is in progress:
-- not in the snapshot, nor since, by the next id that the server will hand out.
SELECT s.now::text, pg_is_in_recovery(),
       pg_snapshot_xmin(s.now) = pg_snapshot_xmax(s.now) AND age(pg_snapshot_xmax(s.now)::xid) = 0
FROM (SELECT pg_current_snapshot() AS now) AS s

-- name: fetch_newest
-- What is over and what is in progress, now; whether this is a standby, which cannot tell; and the highest transaction id
-- of a message that this very snapshot sees.
SELECT pg_current_snapshot()::text, pg_is_in_recovery(), ({newest})

-- name: examine_unfiltered
-- As examine_claim, for as many rows as the batch may have and no filter: nothing is counted for each row. At last, the bytes of what would
-- be copied. The last pair: as in examine_messages.
SELECT a.ids[a.n]::text AS t, a.positions[a.n] AS position, a.n, a.due, a.keys, a.delayed, true, a.copied
FROM (SELECT array_agg(e.transaction_id ORDER BY e.transaction_id, e.position) AS ids,
             array_agg(e.position ORDER BY e.transaction_id, e.position) AS positions,
             count(*) AS n, count(*) FILTER (WHERE e.due) AS due,
             array_agg(e.unique_key) FILTER (WHERE e.unique_key IS NOT NULL) AS keys,
             array_agg(e.position) FILTER (WHERE NOT e.due) AS delayed,
             coalesce(sum(e.stored) FILTER (WHERE NOT e.due), 0) AS copied
      FROM ({rows}) AS e) AS a
WHERE a.n > 0

-- name: examine_claim
-- How far a batch of at most so many matching messages reaches in a snapshot range, how many it has, the unique keys that it frees, and what
-- of it is not due yet: that is copied, one message or so many bytes as they are stored. It ends with its last match, behind
-- which no row is read, or else with the last row; whether that is so is told at last. A CTE gives its rows in the order in
-- which it got them; before PostgreSQL 17 a window with an order would have all of them sorted first.
WITH examined AS MATERIALIZED ({rows}),
numbered AS (
    SELECT e.transaction_id, e.position,
           e.matches AND e.due AS counts,
           row_number() OVER as_read AS n,
           count(*) FILTER (WHERE e.matches AND e.due) OVER as_read AS matched,
           coalesce(sum(e.stored) FILTER (WHERE e.matches AND NOT e.due) OVER as_read, 0)
               + coalesce(lead(CASE WHEN e.matches AND NOT e.due THEN e.stored END) OVER as_read, 0) AS copied_with_next,
           lead(e.position) OVER as_read IS NULL AS is_last
    FROM examined AS e
    WINDOW as_read AS (ROWS UNBOUNDED PRECEDING)
)
SELECT c.transaction_id::text AS t, c.position, c.n, c.matched,
       (SELECT array_agg(k.unique_key) FROM (SELECT e.* FROM examined AS e LIMIT c.n) AS k WHERE k.unique_key IS NOT NULL),
       (SELECT array_agg(d.position) FROM (SELECT e.* FROM examined AS e LIMIT c.n) AS d WHERE d.matches AND NOT d.due),
       c.is_last
FROM numbered AS c
WHERE c.is_last OR (c.counts AND c.matched = {limit}) OR c.copied_with_next > {most_copied}
LIMIT 1

-- name: waiting_rows
-- What of a queue is in no snapshot range, as rows of count_lag: messages that failed and wait for another attempt, and those
-- whose time has come and that were not promoted yet. What counts of the time is since when they may be handed
-- out. The condition is in the words of the queue table's partitions, so that only that of delayed messages is looked into.
(SELECT {matches} AS matches, o.deliver_after AS scheduled FROM {table} AS o
 WHERE (CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = -1
   AND o.last_error IS NOT NULL ORDER BY o.deliver_after LIMIT {limit})
UNION ALL
(SELECT {matches}, greatest(o.deliver_after, '0001-01-03Z') FROM {table} AS o
 WHERE (CASE WHEN o.deliver_after IS NULL THEN (o.position >> 40) & 3 ELSE -1 END) = -1
   AND o.last_error IS NULL AND o.deliver_after <= (SELECT clock_timestamp()) ORDER BY o.deliver_after LIMIT {limit})

-- name: copied_rows
-- Messages of a snapshot range that are kept for when their time has come.
ARRAY(SELECT ROW({processor_id}, d.transaction_id, d.position, d.message_id, d.message_type, d.publication_id,
                 d.partition_key, d.data, d.metadata, d.scheduled, d.deliver_after)::{schema}.competing_copies
      FROM ({rows}) AS d WHERE d.position = ANY ({positions}::bigint[]))

-- name: fetch_attempts
-- How often messages of a queue have failed before, of those that have.
SELECT a.transaction_id::text, a.position, a.attempts FROM ({rows}) AS a WHERE a.attempts > 0
