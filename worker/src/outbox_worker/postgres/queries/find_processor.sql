-- The checkpoints of a processor by which another one may start, with how it is divided, what it reads, and whether it
-- hands out batches.
SELECT c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position,
       d.partition_count, d.key, s.source,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.window_position,
       EXISTS (SELECT 1 FROM {schema}.competing_processors AS p WHERE p.processor_id = c.processor_id) AS competing
FROM {schema}.processor_checkpoints AS c
LEFT JOIN {schema}.processor_partitions AS d ON d.processor_id = c.processor_id
LEFT JOIN {schema}.processor_sources AS s ON s.processor_id = c.processor_id
WHERE c.processor_id = %(processor_id)s
ORDER BY c.partition
