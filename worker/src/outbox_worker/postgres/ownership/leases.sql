-- name: fetch_claim
-- Who holds the processor, without asking for it.
SELECT false AS granted, cluster, namespace, name, uid, claimed_at, vacated_at
FROM {schema}.processor_claims
WHERE processor_id = %(processor_id)s

-- name: end_stuck_transactions
-- End what former owners left open while the server waits for their process: in a COPY, in a pipeline, with a result
-- that no client fetches, no idle timeout runs. Each holds a shared advisory lock on (processor, epoch),
-- in mode Competing on (processor, batch). Given are names of such locks, each with a number, and whether it is that number
-- or every other one that a former owner has.
-- All partitions that are asked about at once: to look at the server's locks and sessions takes milliseconds.
-- Of a session that our role may not see or not end: how many there are, and one of them.
WITH held AS (
    SELECT a.pid, r.rolname, r.rolsuper, a.state IS NULL AS hidden,
           a.state = 'active' AND a.wait_event_type = 'Client' AS stuck,
           pg_has_role(a.usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE') AND NOT r.rolsuper AS ours_to_end
    FROM ({former}) AS o (lock_name, number, has_number)
    JOIN pg_locks AS k
      ON k.locktype = 'advisory' AND k.objsubid = 2
     AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
     AND k.classid::bigint = hashtext(o.lock_name) & 4294967295
     AND (k.objid::bigint IS NOT DISTINCT FROM o.number & 2147483647) = o.has_number
    JOIN pg_stat_activity AS a ON a.pid = k.pid
    JOIN pg_roles AS r ON r.oid = a.usesysid
)
SELECT count(CASE WHEN h.stuck AND h.ours_to_end THEN pg_terminate_backend(h.pid)::int END),
       min(h.pid) FILTER (WHERE h.hidden OR h.stuck AND NOT h.ours_to_end),
       min(h.rolname::text) FILTER (WHERE h.hidden OR h.stuck AND NOT h.ours_to_end),
       coalesce(bool_or(h.hidden), false),
       coalesce(bool_or(NOT h.ours_to_end AND NOT h.rolsuper AND (h.hidden OR h.stuck)), false),
       current_user::text
FROM held AS h

-- name: former_epochs
-- Only once the lease lapsed, or is ours: then no former owner can store any more, and what stored and did not commit is
-- handled again.
SELECT o.lock_name, o.epoch, false
FROM unnest(%(partitions)s::integer[], %(epochs)s::bigint[], %(lock_names)s::text[]) AS o (partition, epoch, lock_name)
JOIN {schema}.processor_leases AS l
  ON l.processor_id = %(processor_id)s AND l.partition = o.partition
 AND (l.expires_at <= clock_timestamp() OR l.epoch = o.epoch)

-- name: former_attempts
-- Only while the batch is ours: then no former attempt can complete it any more. Ours must not have begun: it has the same lock.
SELECT %(lock_name)s::text, b.id, true FROM {schema}.competing_batches AS b
WHERE b.processor_id = %(processor_id)s AND b.id = %(batch)s AND b.owner = %(owner)s AND b.attempt = %(attempt)s

-- name: limit_transaction
-- SET LOCAL with a parameter: idle in the transaction, or a result that the client's side does not take.
SELECT set_config('idle_in_transaction_session_timeout', %(limit)s, true),
       set_config('tcp_user_timeout', %(limit)s, true)
