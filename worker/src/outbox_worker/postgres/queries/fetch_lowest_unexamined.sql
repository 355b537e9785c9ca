-- The oldest transaction that is still open, and below or above it the lowest pair of a message that a window leaves.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text, f.transaction_id::text, f.position
FROM (VALUES (1)) AS always
LEFT JOIN ({rows}) AS f ON true
