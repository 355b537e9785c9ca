-- The first message of a range whose time has not come, and how many come before it.
SELECT d.transaction_id::text AS t, d.position, d.message_id, d.seconds, d.n - 1
FROM (SELECT r.transaction_id, r.position, r.message_id, row_number() OVER () AS n,
             extract(epoch FROM r.deliver_after - clock_timestamp())::float8 AS seconds
      FROM ({rows}) AS r) AS d
WHERE d.seconds > 0
ORDER BY d.n
LIMIT 1
