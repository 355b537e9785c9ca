-- Each checkpoint as it is and as it will be.
SELECT c.processor_id, c.partition, c.last_processed_transaction_id::text, c.last_processed_position,
       coalesce(m.new_transaction_id, c.last_processed_transaction_id)::text
FROM {schema}.processor_checkpoints AS c
LEFT JOIN {schema}.repair_ids AS m
  ON m.repair_id = %(repair_id)s AND m.old_transaction_id = c.last_processed_transaction_id
 AND m.written_here = {written_here}
WHERE NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = c.processor_id)
ORDER BY c.processor_id, c.partition
