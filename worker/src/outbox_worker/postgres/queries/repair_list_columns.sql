-- Where the schema keeps transaction ids and snapshots besides the messages themselves and the history of people's acts, and
-- whether each row there is a processor's: one that reads another database names that one's ids.
SELECT c.relname, EXISTS (SELECT 1 FROM pg_attribute AS p
                          WHERE p.attrelid = c.oid AND p.attname = 'processor_id' AND NOT p.attisdropped),
       array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.atttypid = 'xid8'::regtype),
       array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.atttypid = 'pg_snapshot'::regtype),
       array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.atttypid = 'xid8[]'::regtype)
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = %(schema)s::text::regnamespace AND c.relkind IN ('r', 'p')
  AND c.relname NOT IN ('repairs', 'repair_ids', 'recorded_acts')
  AND NOT (c.oid = ANY (%(messages)s::text[]::regclass[]))
  AND a.atttypid IN ('xid8'::regtype, 'pg_snapshot'::regtype, 'xid8[]'::regtype)
GROUP BY c.oid, c.relname
ORDER BY c.relname
