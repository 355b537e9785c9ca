-- Is there a valid index of the whole table whose first columns are these, in this order?
SELECT EXISTS (
    SELECT 1
    FROM pg_index AS x
    JOIN pg_class AS c ON c.oid = x.indrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND x.indisvalid AND x.indpred IS NULL
      AND (SELECT array_agg(a.attname::text ORDER BY k.ordinality)
           FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, ordinality)
           JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
           WHERE k.ordinality <= cardinality(%(columns)s::text[])) = %(columns)s::text[])
