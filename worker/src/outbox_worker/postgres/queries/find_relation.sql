-- Is there such a table?
SELECT to_regclass(quote_ident(%(schema)s) || '.' || quote_ident(%(table)s)) IS NOT NULL
