-- Tables elsewhere that look like an outbox: the default of a column is the transaction that inserts.
SELECT format('%%I.%%I', n.nspname, c.relname)
FROM pg_attrdef AS d
JOIN pg_class AS c ON c.oid = d.adrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE pg_get_expr(d.adbin, d.adrelid) LIKE '%%pg_current_xact_id()%%'
  AND n.oid <> %(schema)s::text::regnamespace AND NOT (c.oid = ANY (%(messages)s::text[]::regclass[]))
ORDER BY 1
