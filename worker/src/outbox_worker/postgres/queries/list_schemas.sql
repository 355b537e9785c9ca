-- Schemas of ours in this database: a processor of any of them may read a table.
SELECT n.nspname
FROM pg_namespace AS n
WHERE EXISTS (SELECT 1 FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'processor_checkpoints')
  AND EXISTS (SELECT 1 FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = 'applied_migrations')
ORDER BY n.nspname
