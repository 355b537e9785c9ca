-- Is there such a table, and may this role read it?
SELECT f.relation IS NOT NULL, coalesce(has_table_privilege(f.relation, 'SELECT'), false)
FROM (SELECT to_regclass(quote_ident(%(schema)s) || '.' || quote_ident(%(table)s)) AS relation) AS f
