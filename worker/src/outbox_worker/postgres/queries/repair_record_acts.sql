-- Each checkpoint is moved by an act of a person, as a rewind is.
INSERT INTO {schema}.recorded_acts (act, processor_id, partition, from_transaction_id, from_position,
                                    to_transaction_id, to_position, reason, decided_by)
SELECT 'Rebase', c.processor_id, c.partition, c.last_processed_transaction_id, c.last_processed_position,
       coalesce(m.new_transaction_id, c.last_processed_transaction_id), c.last_processed_position, r.reason, r.decided_by
FROM {schema}.repairs AS r
CROSS JOIN {schema}.processor_checkpoints AS c
LEFT JOIN {schema}.repair_ids AS m
  ON m.repair_id = r.id AND m.old_transaction_id = c.last_processed_transaction_id AND m.written_here = {written_here}
WHERE r.id = %(repair_id)s
  AND NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = c.processor_id)
ORDER BY c.processor_id, c.partition
