-- Tables of the schema that producers write: the default of a column is the transaction that inserts.
SELECT c.relname, a.attname
FROM pg_attrdef AS d
JOIN pg_class AS c ON c.oid = d.adrelid
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = d.adnum
WHERE c.relnamespace = %(schema)s::text::regnamespace AND c.relkind = 'r' AND a.atttypid = 'xid8'::regtype
  AND pg_get_expr(d.adbin, d.adrelid) LIKE '%%pg_current_xact_id()%%'
ORDER BY c.relname
