-- The first message of a range whose time has not come, how many come before it, and the last of those.
SELECT d.transaction_id::text AS t, d.position, d.message_id, d.seconds, d.n - 1, d.last_transaction_id::text,
       d.last_position
FROM (SELECT r.transaction_id, r.position, r.message_id, row_number() OVER () AS n,
             extract(epoch FROM r.deliver_after - clock_timestamp())::float8 AS seconds,
             lag(r.transaction_id) OVER () AS last_transaction_id, lag(r.position) OVER () AS last_position
      FROM ({rows}) AS r) AS d
WHERE d.seconds > 0
ORDER BY d.n
LIMIT 1
