-- Held messages to be tried now, or when there are some.
SELECT owned, next_in, blocking, transaction_id::text AS t, "position", key, message_id, message_type, publication_id,
       partition_key, data, metadata, {scheduled} AS scheduled, attempts, deaths
FROM {schema}.take_due_messages(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(limit)s, %(payload)s)
