-- End what former owners left open while the server waits for their process: in a COPY, in a pipeline, with a result
-- that nobody takes, no idle timeout runs. Each holds a shared advisory lock on (processor, epoch). Only once the lease
-- lapsed, or is ours: then none of them can store any more, and what stored and did not commit is handled again.
SELECT count(pg_terminate_backend(a.pid))
FROM pg_locks AS k
JOIN pg_stat_activity AS a ON a.pid = k.pid
WHERE (SELECT l.expires_at <= clock_timestamp() OR l.epoch = %(epoch)s
       FROM {schema}.processor_leases AS l
       WHERE l.processor_id = %(processor_id)s AND l.partition = %(partition)s)
  AND k.locktype = 'advisory' AND k.objsubid = 2
  AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
  AND k.classid::bigint = hashtext(%(lock_name)s) & 4294967295
  AND k.objid::bigint IS DISTINCT FROM %(epoch)s & 2147483647
  AND a.state = 'active' AND a.wait_event_type = 'Client'
  AND pg_has_role(a.usesysid, 'USAGE')
