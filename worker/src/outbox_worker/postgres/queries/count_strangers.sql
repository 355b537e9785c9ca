-- Refused calls of callers without an epoch; approximate.
SELECT {schema}.stranger_refusals(%(processor_id)s)
