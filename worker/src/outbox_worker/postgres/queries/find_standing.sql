-- The checkpoints of a processor, all or all but one partition's, with the same in words that `supersede_processor` compares.
SELECT {schema}.standing_of(%(processor_id)s, %(but_partition)s::int),
       EXISTS (SELECT 1 FROM {schema}.competing_processors AS p WHERE p.processor_id = c.processor_id),
       c.partition, c.last_processed_transaction_id::text AS t, c.last_processed_position,
       c.cursor_kind, c.lower_snapshot::text, c.upper_snapshot::text, c.window_position
FROM {schema}.processor_checkpoints AS c
WHERE c.processor_id = %(processor_id)s AND c.partition IS DISTINCT FROM %(but_partition)s::int
ORDER BY c.partition
