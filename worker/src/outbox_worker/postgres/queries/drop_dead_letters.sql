-- Give dead letters of one partition up for good.
SELECT {schema}.drop_dead_letters(%(processor_id)s, %(partition)s, %(ids)s::bigint[], %(reason)s, %(decided_by)s)
