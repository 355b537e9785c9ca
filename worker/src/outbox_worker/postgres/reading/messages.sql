-- name: examine_messages
-- How far a page of messages reaches, where no filter on types lets only some through: nothing is shipped but the last pair
-- and the counts, and the bytes of the payloads as they are stored, where they are asked for. The page is read once, in order:
-- since PostgreSQL 16 nothing is sorted for the last pair, which is the last element of each array.
SELECT a.ids[a.n]::text AS t, a.positions[a.n] AS position, a.n, a.n, a.delayed, a.stored
FROM (SELECT array_agg(e.transaction_id ORDER BY e.transaction_id, e.position) AS ids,
             array_agg(e.position ORDER BY e.transaction_id, e.position) AS positions,
             count(*) AS n, count(*) FILTER (WHERE e.delayed) AS delayed, sum(e.stored) AS stored
      FROM ({rows}) AS e) AS a
WHERE a.n > 0

-- name: examine_filtered
-- How far a batch of at most so many matching messages reaches, looking at a bounded number of rows: nothing is shipped but the
-- last pair and the counts. It ends with its last match, behind which no row is read, or else with the last row.
SELECT c.transaction_id::text AS t, c.position, c.n, c.matched, c.delayed, NULL
FROM (SELECT e.transaction_id, e.position, e.matches,
             row_number() OVER in_order AS n,
             count(*) FILTER (WHERE e.matches) OVER in_order AS matched,
             count(*) FILTER (WHERE e.matches AND e.delayed) OVER in_order AS delayed,
             lead(e.position) OVER in_order IS NULL AS is_last
      FROM ({rows}) AS e
      WINDOW in_order AS (ORDER BY e.transaction_id, e.position ROWS UNBOUNDED PRECEDING)) AS c
WHERE c.is_last OR (c.matches AND c.matched = {most})
ORDER BY c.transaction_id, c.position
LIMIT 1

-- name: count_lag
-- What is committed behind the checkpoint, readable yet or not, counted up to a cap.
SELECT count(*) FILTER (WHERE o.matches),
       count(*),
       coalesce(extract(epoch FROM clock_timestamp() - min(o.scheduled) FILTER (WHERE o.matches)), 0)::float8
FROM ({rows}) AS o

-- name: fetch_waiting
-- The first committed message at or above the high-water mark, if one waits there: for how long it has been stored.
SELECT coalesce(extract(epoch FROM clock_timestamp() - {moment}), 0)::float8
FROM {table} AS o
WHERE o.{transaction_id} >= pg_snapshot_xmin(pg_current_snapshot())
ORDER BY {pair}
LIMIT 1

-- name: fetch_messages
-- Messages, payloads as text, in the order of pairs or of positions.
SELECT o.transaction_id, o.position, o.message_id, o.message_type, o.publication_id, o.partition_key, {payload}, o.scheduled,
       o.deliver_after
FROM ({rows}) AS o
ORDER BY {order}

-- name: fetch_payloads
-- Large payloads in a batch's order: the first one, and as many behind it as are stored in no more bytes in all. Of the
-- others nothing is read that is stored out of line.
SELECT k.transaction_id::text AS t, k.position, coalesce(k.data::text, k.copied_data) AS data,
       coalesce(k.metadata::text, k.copied_metadata) AS metadata, k.stored
FROM (SELECT l.*, sum(l.stored) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS total
      FROM (SELECT p.*, coalesce(pg_column_size(p.data), pg_column_size(p.copied_data), 0)
                        + coalesce(pg_column_size(p.metadata), pg_column_size(p.copied_metadata), 0) AS stored
            FROM ({rows}) AS p) AS l) AS k
WHERE k.total <= {most} OR k.total = k.stored
ORDER BY {order}

-- name: begin_reading_ahead
-- Begins a transaction that only reads, for a statement whose result nothing waits for. Frozen, this process must keep no
-- locks: idle, and where it does not take the result. On a standby, and where a crash left no run, it fails.
BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY;
SELECT set_config('statement_timeout', {longest}, true), set_config('tcp_user_timeout', {longest}, true),
       set_config('idle_in_transaction_session_timeout', {longest}, true),
       set_config('synchronous_commit', 'local', true);
SELECT {schema}.server_run()::text
