-- The oldest transaction that is still open: everything below it is settled.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text
