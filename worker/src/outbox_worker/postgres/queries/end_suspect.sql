-- They were tried, and this process lives.
SELECT {schema}.end_suspect(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid)
