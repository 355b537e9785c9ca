-- name: list_transactions
-- Open transactions that have written, of every database of the server, and prepared ones, the oldest first: the first
-- is the high-water mark's holder if its id is the bound. Starts are shown only to those who may see them.
WITH bound AS MATERIALIZED (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS transaction_id),
writing AS (
    SELECT a.backend_xid AS xid, a.pid, a.backend_type, a.application_name, a.datname, a.usename, a.state,
           NULL::text AS gid, a.xact_start AS began
    FROM pg_stat_activity AS a
    WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
    UNION ALL
    SELECT p.transaction, NULL, NULL, NULL, p.database, p.owner, NULL, p.gid, p.prepared
    FROM pg_prepared_xacts AS p
)
SELECT b.transaction_id::text AS bound, current_user::text AS reader, w.xid::text AS transaction_id,
       coalesce(w.xid = b.transaction_id::xid, false) AS holds, w.pid, nullif(w.application_name, '') AS application,
       w.datname AS database, w.usename AS role, w.state, w.gid AS prepared,
       CASE WHEN w.began IS NOT NULL THEN greatest(extract(epoch FROM clock_timestamp() - w.began), 0) END::float8 AS age_seconds,
       w.backend_type
FROM bound AS b
LEFT JOIN writing AS w ON true
ORDER BY coalesce(w.xid = b.transaction_id::xid, false) DESC, age(w.xid) DESC NULLS LAST
