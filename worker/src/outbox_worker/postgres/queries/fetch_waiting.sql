-- The first committed message at or above the bound, if one waits there: for how long it has been stored.
SELECT coalesce(extract(epoch FROM clock_timestamp() - {moment}), 0)::float8
FROM {table} AS o
WHERE o.{transaction_id} >= pg_snapshot_xmin(pg_current_snapshot())
ORDER BY {pair}
LIMIT 1
