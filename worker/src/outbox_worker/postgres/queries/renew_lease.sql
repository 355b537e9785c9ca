-- The heartbeat.
SELECT {schema}.renew_lease(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(lease)s::interval)
