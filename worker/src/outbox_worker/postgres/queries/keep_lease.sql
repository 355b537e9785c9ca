-- Before a batch is handed over.
SELECT {schema}.keep_lease(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(lease)s::interval)
