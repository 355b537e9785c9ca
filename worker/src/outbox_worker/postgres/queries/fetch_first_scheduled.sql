-- The first message, in reading order, stored at or after the time asked for.
SELECT o.{transaction_id}::text AS t, o.{position}
FROM {table} AS o
WHERE o.{scheduled} >= %(timestamp)s AND o.{transaction_id} IS NOT NULL
ORDER BY o.{transaction_id}, o.{position}
LIMIT 1
