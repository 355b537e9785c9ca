-- The first message, in reading order, whose position is at least the one asked for.
SELECT o.{transaction_id}::text AS t, o.{position}
FROM {table} AS o
WHERE o.{position} >= %(position)s AND o.{transaction_id} IS NOT NULL
ORDER BY o.{transaction_id}, o.{position}
LIMIT 1
