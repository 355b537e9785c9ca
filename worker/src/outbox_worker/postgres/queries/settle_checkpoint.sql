-- What is stored, once a transaction whose COMMIT got no answer is over.
SELECT owned, transaction_id::text AS t, "position"
FROM {schema}.settle_processor_checkpoint(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid)
