-- name: carry_rows
-- A range of the outbox, to be looked at in another database.
SELECT coalesce(json_agg(r), '[]')::text FROM ({rows}) AS r

-- name: carried_relation
-- A range of the outbox of another database, in its order.
SELECT r.transaction_id, r.position, r.message_id, r.message_type, r.publication_id, r.partition_key, r.data, r.metadata,
       r.scheduled, r.deliver_after, r.key
FROM ROWS FROM (json_to_recordset({rows}::json) AS (
         transaction_id xid8, position bigint, message_id text, message_type text, publication_id text,
         partition_key text, data text, metadata text, scheduled timestamptz, deliver_after timestamptz, key text
     )) WITH ORDINALITY AS r (transaction_id, position, message_id, message_type, publication_id, partition_key, data,
                              metadata, scheduled, deliver_after, key, n)
ORDER BY r.n

-- name: survey_range
-- The messages of a range in its order: those that are to be handled now, with their keys, only with `all`; and those that
-- are not: their time has not come, they are held already, or an earlier message of their key is held or dead. One row of
-- arrays, in the order of the rows that they are made of: a row for each message takes longer. No payload travels.
SELECT json_agg(s.t) FILTER (WHERE NOT s.excluded AND {all}), json_agg(s.position) FILTER (WHERE NOT s.excluded AND {all}),
       json_agg(s.key) FILTER (WHERE NOT s.excluded AND {all}),
       json_agg(s.t) FILTER (WHERE s.excluded), json_agg(s.position) FILTER (WHERE s.excluded)
FROM (
    SELECT b.transaction_id::text AS t, b.position, b.key,
           coalesce(b.deliver_after > clock_timestamp(), false)
           OR EXISTS (SELECT 1 FROM {schema}.held_messages AS h
                      WHERE h.processor_id = {processor_id} AND h.partition = {partition}
                        AND h.transaction_id = b.transaction_id AND h.position = b.position)
           OR EXISTS (SELECT 1 FROM {schema}.held_messages AS h
                      WHERE h.processor_id = {processor_id} AND h.partition = {partition} AND h.blocks
                        AND h.key_hash = hashtextextended(b.key, 0) AND h.key = b.key)
           OR EXISTS (SELECT 1 FROM {schema}.dead_letters AS d
                      WHERE d.processor_id = {processor_id} AND d.partition = {partition} AND d.blocks
                        AND d.key_hash = hashtextextended(b.key, 0) AND d.key = b.key) AS excluded
    FROM ({rows}) AS b
) AS s

-- name: find_delayed
-- The first message of a range whose time has not come, and how many come before it.
SELECT d.transaction_id::text AS t, d.position, d.message_id, d.seconds, d.n - 1
FROM (SELECT r.transaction_id, r.position, r.message_id, row_number() OVER () AS n,
             extract(epoch FROM r.deliver_after - clock_timestamp())::float8 AS seconds
      FROM ({rows}) AS r) AS d
WHERE d.seconds > 0
ORDER BY d.n
LIMIT 1

-- name: list_range
-- The messages of a range in its order, each with its key, without the excluded ones; as survey_range.
SELECT json_agg(b.transaction_id::text), json_agg(b.position), json_agg(b.key)
FROM ({rows}) AS b
WHERE (b.transaction_id, b.position) NOT IN (
    SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))

-- name: hold_messages
-- Keep messages of a range that are not handled, in the transaction that passes them. Their payloads never leave the
-- database. Beside the answer: how many of them the range has. The server has several copies of an array in memory, and an
-- array has an end at 1 GB: so the function is called for each 4 MB, as in one call with what becomes a dead letter first.
SELECT coalesce(min(h.kept), 0), coalesce(sum(h.found), 0)::bigint
FROM (
    SELECT {schema}.hold_messages({processor_id}, {partition}, {epoch}, {token}::uuid,
               array_agg(ROW(NULL, 0, c.key, NULL, 0, c.transaction_id, c.position, c.message_id, c.message_type,
                             c.publication_id, c.partition_key, c.data, c.metadata, c.scheduled, false, false, 0, 0, NULL,
                             NULL, NULL, c.deliver_after)::{schema}.held_messages ORDER BY c.n),
               {decisions}::jsonb) AS kept,
           count(*) AS found
    FROM (SELECT b.*, (b.transaction_id, b.position) NOT IN (
                     SELECT v.t, v.p FROM jsonb_to_recordset({decisions}::jsonb) AS v (t xid8, p bigint, action text)
                     WHERE v.action = 'DeadLetter') AS lives,
                 sum(coalesce(octet_length(b.data), 0) + coalesce(octet_length(b.metadata), 0))
                     OVER (ORDER BY b.n ROWS UNBOUNDED PRECEDING) / 4000000 AS part
          FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
          WHERE (b.transaction_id, b.position) IN (
              SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))) AS c
    GROUP BY c.lives, c.part
    ORDER BY c.lives, c.part
) AS h

-- name: take_due_messages
-- Held messages to be tried now, or when there are some.
SELECT owned, next_in, blocking, transaction_id::text AS t, "position", key, message_id, message_type, publication_id,
       partition_key, {payload}, {scheduled} AS scheduled, attempts, crash_count
FROM {schema}.take_due_messages(%(processor_id)s, %(partition)s, %(epoch)s, %(owner_token)s::uuid, %(limit)s, %(payload)s) AS due

-- name: held_payloads
-- Payloads of held messages as they are stored, each with its place in the order of their keys.
SELECT h.transaction_id, h.position, h.place, h.data, h.metadata, NULL AS copied_data, NULL AS copied_metadata
FROM {schema}.held_messages AS h
WHERE h.processor_id = {processor_id} AND h.partition = {partition}
  AND (h.transaction_id, h.position) IN (
      SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))

-- name: find_last
-- The last message of a range.
SELECT r.transaction_id::text AS t, r.position FROM ({rows}) AS r ORDER BY r.transaction_id DESC, r.position DESC LIMIT 1

-- name: held_relation
-- Held messages as the relation `batch`, in the order of their keys.
SELECT h.transaction_id, h.position, h.message_id, h.message_type, h.publication_id, h.partition_key,
       h.data::jsonb AS data, h.metadata::jsonb AS metadata, h.scheduled, h.place AS ordinal
FROM {schema}.held_messages AS h
WHERE h.processor_id = {processor_id} AND h.partition = {partition}
  AND (h.transaction_id, h.position) IN (
      SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))
ORDER BY h.place

-- name: without_excluded
-- A range without the excluded messages.
SELECT r.* FROM ({rows}) AS r
WHERE (r.transaction_id, r.position) NOT IN (
    SELECT w.t, w.p FROM unnest({transaction_ids}::xid8[], {positions}::bigint[]) AS w (t, p))

-- name: count_failures
-- Held messages and dead letters of a processor, counted up to a cap. Held ones are in two indexes: what is behind blocks.
SELECT (SELECT count(*) FROM (SELECT 1 FROM {schema}.held_messages AS h
                              WHERE h.processor_id = %(processor_id)s AND NOT h.behind
                              UNION ALL
                              SELECT 1 FROM {schema}.held_messages AS h
                              WHERE h.processor_id = %(processor_id)s AND h.blocks AND h.behind
                              LIMIT %(cap)s + 1) AS h),
       (SELECT count(*) FROM (SELECT 1 FROM {schema}.dead_letters AS d
                              WHERE d.processor_id = %(processor_id)s LIMIT %(cap)s + 1) AS d)

-- name: list_blocked_keys
-- Keys that wait for a message of theirs, those that wait for a person first.
SELECT b.key, b.partition, b.message_id, b.attempts, b.error_class, b.next_attempt_at, b.dead
FROM (
    (SELECT left(d.key, 128) AS key, d.partition, d.message_id, d.attempts, d.error_class,
            NULL::timestamptz AS next_attempt_at, true AS dead, d.id AS n
     FROM {schema}.dead_letters AS d
     WHERE d.processor_id = %(processor_id)s AND d.blocks
     ORDER BY d.id LIMIT %(limit)s)
    UNION ALL
    (SELECT left(h.key, 128), h.partition, h.message_id, h.attempts, h.error_class,
            nullif(h.next_attempt_at, 'infinity'), false, h.place
     FROM {schema}.held_messages AS h
     WHERE h.processor_id = %(processor_id)s AND h.blocks AND NOT h.behind AND h.attempts > 0
     ORDER BY h.next_attempt_at DESC, h.place LIMIT %(limit)s)
) AS b
ORDER BY b.next_attempt_at DESC NULLS FIRST, b.n
LIMIT %(limit)s

-- name: observe_held
-- For each partition: are messages held that are due, does something block later messages?
SELECT p.partition,
       coalesce((SELECT min(h.next_attempt_at) <= clock_timestamp() FROM {schema}.held_messages AS h
                 WHERE h.processor_id = %(processor_id)s AND h.partition = p.partition AND NOT h.behind), false) AS due,
       EXISTS (SELECT 1 FROM {schema}.held_messages AS h
               WHERE h.processor_id = %(processor_id)s AND h.partition = p.partition AND h.blocks)
       OR EXISTS (SELECT 1 FROM {schema}.dead_letters AS d
                  WHERE d.processor_id = %(processor_id)s AND d.partition = p.partition AND d.blocks) AS blocking
FROM {schema}.processor_checkpoints AS p
WHERE p.processor_id = %(processor_id)s

-- name: name_message
-- The first message of a range, as a person knows it.
SELECT b.transaction_id::text AS t, b.position, b.message_id, b.message_type, b.key
FROM (SELECT r.*, row_number() OVER () AS n FROM ({rows}) AS r) AS b
ORDER BY b.n
LIMIT 1

-- name: record_giving_up
-- Write down that a person gives up the message at which a processor stands: the worker makes it a dead letter.
INSERT INTO {schema}.audit_log (action, processor_id, partition, to_transaction_id, to_position, reason, decided_by)
VALUES ('GiveUp', %(processor_id)s, %(partition)s, %(at_transaction_id)s::xid8, %(at_position)s, %(reason)s, %(decided_by)s)

-- name: find_giving_up
-- Has a person given up the message at this place? A rewind since then asks for it again.
SELECT EXISTS (
    SELECT 1 FROM {schema}.audit_log AS a
    WHERE a.action = 'GiveUp' AND a.processor_id = %(processor_id)s AND a.partition = %(partition)s
      AND a.to_transaction_id = %(at_transaction_id)s::xid8 AND a.to_position = %(at_position)s
      AND NOT EXISTS (SELECT 1 FROM {schema}.audit_log AS r
                      WHERE r.action = 'Rewind' AND r.processor_id = a.processor_id AND r.partition = a.partition
                        AND r.id > a.id))
