-- Held messages failed again.
SELECT {schema}.fail_held_messages(%(processor_id)s, %(partition)s, %(epoch)s, %(token)s::uuid, %(verdicts)s::jsonb)
