-- An expression: the row is of a processor that reads this database.
NOT EXISTS (SELECT 1 FROM {schema}.processor_sources AS s WHERE s.processor_id = {row}.processor_id)
