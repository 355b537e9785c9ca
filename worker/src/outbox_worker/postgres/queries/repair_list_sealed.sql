-- Windows that were not edited by hand.
SELECT c.processor_id, c.partition
FROM {schema}.processor_checkpoints AS c
WHERE c.kept_window IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {schema}.find_edit(c.processor_id, c.partition))
