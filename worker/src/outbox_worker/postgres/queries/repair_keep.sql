-- What stands in the row now is ours.
SELECT {schema}.keep_checkpoint(%(processor_id)s, %(partition)s)
