-- name: fetch_queue
-- Is there such a queue?
SELECT 1 FROM {schema}.queues WHERE queue = %(queue)s

-- name: fetch_competing
-- Over what a processor in mode Competing works; no row: it is of another mode.
SELECT queue FROM {schema}.competing_processors WHERE processor_id = %(processor_id)s

-- name: take_waiting
-- A batch that was handed back, or whose lease is over, or messages whose time has come; of those that failed before, or of the others.
SELECT b.id, b.priority, b.attempt, b.lower_snapshot::text, b.upper_snapshot::text, b.after_transaction_id::text,
       b.after_position, b.upto_transaction_id::text, b.upto_position, b.messages, b.chunk, b.crash_count,
       b.transaction_ids::text[], b.positions, b.attempts, b.excluded
FROM {schema}.take_waiting(%(processor_id)s, %(claim_uid)s, %(owner)s, %(pod)s, %(lease)s, %(limit)s, %(failed)s) AS b

-- name: lock_dispatch_position
-- Opens the transaction in which a batch is handed out. A process that is frozen in it does not keep the lock.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT set_config('idle_in_transaction_session_timeout', '2000', true), set_config('statement_timeout', '30000', true);
SELECT f.priority, f.id, f.lower_snapshot::text, f.upper_snapshot::text, f.after_transaction_id::text, f.after_position,
       f.now_snapshot::text
FROM {schema}.lock_dispatch_positions({processor_id}, {claim_uid}) AS f

-- name: claim_next
-- Hands the batch out and ends the transaction; null: only the dispatch position moved.
SELECT {schema}.claim_next({processor_id}, {priority}, {dispatch_position}, {lower}::pg_snapshot, {upper}::pg_snapshot,
                           {after_transaction_id}::xid8, {after_position}, {upto_transaction_id}::xid8, {upto_position},
                           {whole}, {messages}, {keys}::text[], {delayed}, {owner}, {pod}, {lease}::interval);
COMMIT

-- name: complete_batch
-- So many messages up to the pair are done; false: the batch is another consumer's; null: nothing was done, for the
-- server recovered from a crash, and may have lost how far the batch was.
SELECT CASE WHEN coalesce({schema}.server_run() = %(server_run)s::uuid, true) THEN
       {schema}.complete_batch(%(processor_id)s, %(batch)s, %(owner)s, %(attempt)s, %(upto_transaction_id)s::xid8,
                               %(upto_position)s, %(messages)s) END

-- name: defer_messages
-- What is up to the pair is behind, and what failed of it leaves the batch; false: the batch is another consumer's; null: as in
-- complete_batch.
SELECT CASE WHEN coalesce({schema}.server_run() = %(server_run)s::uuid, true) THEN
       {schema}.defer_messages(%(processor_id)s, %(batch)s, %(owner)s, %(attempt)s, %(upto_transaction_id)s::xid8,
                               %(upto_position)s, %(messages)s, %(failed)s::json) END

-- name: fetch_heads
-- Of each priority of a queue the first message that was not handed out: when it was stored, which a producer may have said
-- wrongly. Messages of transactions that were in progress for the lower snapshot come first.
SELECT l.priority, least(greatest(head.scheduled, '0001-01-03Z'), clock_timestamp())
FROM unnest({priorities}::int[], {starts}::text[], {positions}::bigint[], {ends}::text[], {uppers}::text[], {late}::text[])
     AS l (priority, start, position, upto, upper_snapshot, late)
CROSS JOIN LATERAL (
    SELECT h.scheduled FROM (
        (SELECT o.transaction_id, o.position, o.scheduled FROM {table} AS o
         WHERE l.late <> '' AND {live} AND o.priority = l.priority
           AND o.transaction_id = ANY (string_to_array(l.late, ',')::xid8[])
         ORDER BY o.transaction_id, o.position LIMIT 1)
        UNION ALL
        (SELECT o.transaction_id, o.position, o.scheduled FROM {table} AS o
         WHERE {live} AND o.priority = l.priority AND (o.transaction_id, o.position) > (l.start::xid8, l.position)
           AND o.transaction_id < l.upto::xid8 AND pg_visible_in_snapshot(o.transaction_id, l.upper_snapshot::pg_snapshot)
         ORDER BY o.transaction_id, o.position LIMIT 1)
    ) AS h ORDER BY h.transaction_id, h.position LIMIT 1
) AS head

-- name: rotate_competing
-- Empties what holds dead rows only.
SELECT {schema}.rotate_competing() || {schema}.rotate_queue(%(processor_id)s, %(keep)s, %(segment_bytes)s)

-- name: count_unfinished
-- What was handed out and is not done: messages in batches, batches, messages that wait for another attempt, live consumers.
SELECT coalesce(sum(b.messages), 0)::bigint, count(*)::int, count(*) FILTER (WHERE b.owner IS NULL OR b.expires_at < clock_timestamp())::int,
       (SELECT count(*) FROM (SELECT FROM {schema}.competing_retries r
                              WHERE r.processor_id = %(processor_id)s LIMIT %(cap)s) AS w)::int,
       (SELECT count(*) FROM {schema}.processor_members m
        WHERE m.processor_id = %(processor_id)s AND m.expires_at > clock_timestamp())::int,
       coalesce(extract(epoch FROM clock_timestamp() - min(b.claimed_at)), 0)::float8
FROM {schema}.competing_batches AS b WHERE b.processor_id = %(processor_id)s

-- name: list_competing
-- Processors in mode Competing, and over what they work.
SELECT processor_id, queue FROM {schema}.competing_processors

-- name: fetch_dispatch_positions
-- The dispatch position of each priority, and the snapshot of now.
SELECT DISTINCT ON (f.priority) f.priority, f.id, f.lower_snapshot::text, f.upper_snapshot::text, f.after_transaction_id::text,
       f.after_position, pg_current_snapshot()::text
FROM {schema}.competing_dispatch_positions AS f WHERE f.processor_id = %(processor_id)s
ORDER BY f.priority, f.id DESC

-- name: fetch_next_due
-- Seconds until a batch may be taken over or a message's time has come, if nothing is written meanwhile; null: nothing waits,
-- or only what has no time (infinity). Before PostgreSQL 17 nothing can be taken from infinity.
SELECT extract(epoch FROM nullif(least(
    (SELECT min(CASE WHEN b.owner IS NULL THEN clock_timestamp() ELSE b.expires_at END)
     FROM {schema}.competing_batches b WHERE b.processor_id = {processor_id}),
    (SELECT min(r.due_at) FROM {schema}.competing_retries r WHERE r.processor_id = {processor_id}),
    {delayed}), 'infinity') - clock_timestamp())::float8

-- name: first_delayed
-- When the first delayed message of a queue may be handed out, in the words of the queue table's partitions. Before
-- PostgreSQL 17 nothing can be taken from -infinity either.
(SELECT greatest(d.deliver_after, '0001-01-03Z') FROM {table} d
 WHERE (CASE WHEN d.deliver_after IS NULL THEN (d.position >> 40) & 3 ELSE -1 END) = -1 ORDER BY d.deliver_after LIMIT 1)
