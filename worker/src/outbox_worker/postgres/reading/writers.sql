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
SELECT b.transaction_id::text AS bound, current_user::text AS reader, w.xid::text AS xid,
       coalesce(w.xid = b.transaction_id::xid, false) AS holds,
       w.pid, w.backend_type, w.application_name, w.datname, w.usename, w.state, w.gid,
       extract(epoch FROM clock_timestamp() - w.began)::float8 AS age
FROM bound AS b
LEFT JOIN writing AS w ON true
ORDER BY coalesce(w.xid = b.transaction_id::xid, false) DESC, age(w.xid) DESC NULLS LAST
