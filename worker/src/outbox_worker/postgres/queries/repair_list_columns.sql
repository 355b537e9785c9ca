-- Where the schema keeps transaction ids and snapshots besides the messages themselves and the history of people's acts.
SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.atttypid = 'xid8'::regtype),
       array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.atttypid = 'pg_snapshot'::regtype),
       array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.atttypid = 'xid8[]'::regtype)
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = %(schema)s::text::regnamespace AND c.relkind IN ('r', 'p')
  AND c.relname NOT IN ('repairs', 'repair_ids', 'recorded_acts')
  AND NOT (c.oid = ANY (%(messages)s::text[]::regclass[]))
  AND a.atttypid IN ('xid8'::regtype, 'pg_snapshot'::regtype, 'xid8[]'::regtype)
GROUP BY c.relname
ORDER BY c.relname
