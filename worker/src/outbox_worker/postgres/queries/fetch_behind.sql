-- The highest transaction id among the rows, if this server has not reached it: a restored database. A transaction sees
-- its own rows, which its snapshot's end need not have reached.
SELECT o.{transaction_id}::text AS t, pg_snapshot_xmax(pg_current_snapshot())::text AS next
FROM (SELECT o.{transaction_id} FROM {table} AS o WHERE o.{transaction_id} IS NOT NULL
      ORDER BY o.{transaction_id} DESC LIMIT 1) AS o
WHERE o.{transaction_id} >= pg_snapshot_xmax(pg_current_snapshot())
  AND o.{transaction_id} IS DISTINCT FROM pg_current_xact_id_if_assigned()
