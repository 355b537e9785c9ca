-- The reading bound and who holds it: every session shows its transaction id, its start only to those who may see it.
WITH bound AS MATERIALIZED (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS transaction_id)
SELECT b.transaction_id::text AS t,
       a.pid, a.application_name, a.datname, a.usename, p.gid, p.database,
       extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start))::float8 AS age
FROM bound AS b
LEFT JOIN pg_stat_activity AS a ON a.backend_xid = b.transaction_id::xid
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = b.transaction_id::xid
LIMIT 1
