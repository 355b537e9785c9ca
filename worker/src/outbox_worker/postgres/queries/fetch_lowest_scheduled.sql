-- The lowest position of what was stored at or after the time asked for.
SELECT min(o.{position})
FROM {table} AS o
WHERE o.{scheduled} >= %(timestamp)s AND o.{transaction_id} IS NOT NULL
