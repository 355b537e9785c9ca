-- Let a standby in at once.
SELECT {schema}.release_lease(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid)
