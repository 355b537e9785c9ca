-- name: explain_slot
-- How the planner would read one slot in order.
EXPLAIN (FORMAT JSON)
SELECT 1 FROM {table} AS o WHERE {slot} = 0 AND ({pair}) > ('0'::xid8, 0::bigint) ORDER BY {pair} LIMIT 1

-- name: fetch_unfinished_index
-- Is the unfinished index of this name being built at this moment? No row: there is no such index.
SELECT EXISTS (SELECT 1 FROM pg_stat_progress_create_index AS b WHERE b.index_relid = x.indexrelid)
FROM pg_index AS x
JOIN pg_class AS c ON c.oid = x.indexrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(name)s AND NOT x.indisvalid
