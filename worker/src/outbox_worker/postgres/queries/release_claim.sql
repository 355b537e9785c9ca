-- The resource goes: give the claim up at once.
SELECT {schema}.release_claim(%(processor_id)s, %(uid)s)
