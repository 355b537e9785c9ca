-- Heartbeat of a consumer, or of one batch: how many are its own.
SELECT {schema}.renew_batches(%(processor_id)s, %(owner)s, %(lease)s, %(batch)s, %(attempt)s)
