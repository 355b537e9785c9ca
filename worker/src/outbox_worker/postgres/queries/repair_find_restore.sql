-- The last transaction that wrote what came with a restore, and whether any of it is ahead of this server: a row that names a
-- transaction above its own writer's was not written by it. The first migration's row is as old as the restore.
SELECT greatest(ahead.writer, coalesce(schema.writer, 2))::text,
       ahead.writer IS NOT NULL OR coalesce(unreached.it, false)
FROM (SELECT max(%(now)s - age(o.xmin)) AS writer FROM ({rows}) AS o (t, xmin)
      WHERE o.t::text::numeric > %(now)s - age(o.xmin)) AS ahead,
     (SELECT min(%(now)s - age(m.xmin)) AS writer FROM {schema}.applied_migrations AS m) AS schema,
     (SELECT bool_or(c.last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot())) AS it
      FROM {schema}.processor_checkpoints AS c
      WHERE NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = c.processor_id)) AS unreached
