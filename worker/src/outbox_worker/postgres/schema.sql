-- name: fetch_columns
-- The outbox's columns with what stands behind their defaults, both without the quotes of quote_all_identifiers.
SELECT a.attname, replace(format_type(a.atttypid, NULL), '"', '') AS type, a.attnotnull,
       coalesce(replace(pg_get_expr(d.adbin, d.adrelid), '"', ''), CASE WHEN a.attidentity <> '' THEN 'identity' END) AS default_text,
       s.seqrelid::regclass::text AS sequence, s.seqcache, s.seqcycle, s.seqincrement
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
LEFT JOIN pg_depend AS p ON p.refclassid = 'pg_class'::regclass AND p.deptype IN ('n', 'i') AND (
       (p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid AND p.deptype = 'n' AND p.refobjid <> c.oid))
LEFT JOIN pg_depend AS i ON i.classid = 'pg_class'::regclass AND i.refclassid = 'pg_class'::regclass
       AND i.refobjid = c.oid AND i.refobjsubid = a.attnum AND i.deptype = 'i'
LEFT JOIN pg_sequence AS s ON s.seqrelid = coalesce(p.refobjid, i.objid)
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p', 'v', 'f', 'm')
ORDER BY a.attnum

-- name: fetch_table
-- The table's oid, and what it is; and this role, if row-level security of the table applies to it and its policies may hide
-- rows: any but USING (true).
SELECT c.oid::bigint, c.relkind::text,
       CASE WHEN row_security_active(c.oid) AND NOT coalesce((
           SELECT bool_or(p.polpermissive AND pg_get_expr(p.polqual, p.polrelid) = 'true')
              AND bool_and(p.polpermissive OR pg_get_expr(p.polqual, p.polrelid) = 'true')
           FROM pg_policy AS p
           WHERE p.polrelid = c.oid AND p.polcmd IN ('r', '*')
             AND EXISTS (SELECT 1 FROM unnest(p.polroles) AS r WHERE r = 0 OR pg_has_role(r, 'USAGE'))), false)
       THEN quote_ident(current_user) END
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s
