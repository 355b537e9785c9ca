-- The last statement of a swap.
SELECT {schema}.supersede_processor(
    %(processor_id)s, %(by)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(standing)s, %(decided_by)s)
