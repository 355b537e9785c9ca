-- How the planner would read one slot in order.
EXPLAIN (FORMAT JSON)
SELECT 1 FROM {table} AS o WHERE {slot} = 0 AND ({slot}, {pair}) > (0, '0'::xid8, 0::bigint) ORDER BY {pair} LIMIT 1
