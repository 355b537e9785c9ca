-- Give dead letters of one partition back to the processor.
SELECT {schema}.redrive_dead_letters(%(processor_id)s, %(partition)s, %(ids)s::bigint[], %(reason)s, %(decided_by)s)
