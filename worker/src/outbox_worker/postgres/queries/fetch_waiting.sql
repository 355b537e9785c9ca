-- Is a committed message waiting at or above the bound?
SELECT EXISTS (
    SELECT 1 FROM {table} AS o
    WHERE o.{transaction_id} >= pg_snapshot_xmin(pg_current_snapshot()))
